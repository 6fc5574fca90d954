"""One actor: channel, places, frame, the group of workers that carries frames, policy, threads."""
