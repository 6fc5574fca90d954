"""The row "thread batch" by mosec: `python mosec_server.py --port PORT`, in the environment of the peers."""

import time

import mosec


class Doubler(mosec.Worker):
    def forward(self, data: list[dict[str, float]]) -> list[dict[str, float]]:
        time.sleep(0.005)
        return [{"output": each["input"] * 2} for each in data]


if __name__ == "__main__":
    server = mosec.Server()
    server.append_worker(Doubler, max_batch_size=64, route="/predict")
    server.run()
