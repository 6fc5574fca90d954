"""The row "thread batch" by LitServe: `python litserve_server.py --port PORT`, in the environment of the peers."""

import sys
import time
from typing import Any

import litserve


class Doubler(litserve.LitAPI):
    def setup(self, device: Any) -> None:
        pass

    def decode_request(self, request: dict[str, float]) -> float:
        return request["input"]

    def predict(self, xs: list[float]) -> list[float]:
        time.sleep(0.005)
        return [x * 2 for x in xs]

    def encode_response(self, output: float) -> dict[str, float]:
        return {"output": output}


if __name__ == "__main__":
    # With batch_timeout=0.005, and with fast_queue=True, it was not faster.
    server = litserve.LitServer(Doubler(max_batch_size=64), accelerator="cpu", devices=1)
    server.run(
        host="127.0.0.1", port=int(sys.argv[-1]), log_level="warning", generate_client_file=False, access_log=False
    )
