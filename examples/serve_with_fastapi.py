"""A PyTorch model under uvicorn: four workers, one copy of its weights, and new weights without a restart.

With gunicorn: `gunicorn -k uvicorn_worker.UvicornWorker -w 4 serve_with_fastapi:app`, with and without --preload.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.request import urlopen

import torch
from fastapi import FastAPI

import vram


def build() -> torch.nn.Module:
    """Make the model; where it is made on published weights, its parameters take no memory."""
    return torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 1))


@asynccontextmanager
async def lifespan(app: FastAPI) -> Any:
    """Follow the name in each worker: after the fork, where gunicorn's --preload forks."""
    with vram.follow("classifier") as app.state.weights:
        app.state.model = 0, None
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/")
def predict(x: float) -> dict[str, Any]:
    """Answer by the newest weights; a request that is under way keeps those that it has."""
    lease = app.state.weights.current()  # costs no call of the keeper
    if app.state.model[0] != lease.version:
        app.state.model = lease.version, lease.module(build)
    version, model = app.state.model
    with torch.inference_mode():
        return {"worker": os.getpid(), "version": version, "y": float(model(torch.full((1, 1024), x)))}


if __name__ == "__main__":  # instead of `vram keep --background`, a program that publishes, and uvicorn by hand
    words = ["-m", "uvicorn", "--workers", "4", "--port", "8765", "--log-level", "error", "serve_with_fastapi:app"]
    with vram.private_keeper(), subprocess.Popen([sys.executable, *words], cwd=os.path.dirname(__file__)) as server:
        for version in (1, 2):
            vram.publish("classifier", build())
            workers: set[int] = set()
            while len(workers) < 4 and server.poll() is None:
                with suppress(OSError), urlopen("http://127.0.0.1:8765/?x=0.5") as reply:
                    said = json.load(reply)
                    workers |= {said["worker"]} if said["version"] == version else set()
            print(f"{len(workers)} workers answer by version {version}")
        server.terminate()
