"""One actor: channel, places, frame, the crew of workers that carries frames, policy, threads and processes."""
