"""OpenVINO GenAI's continuous batching on the fixed workload, for `throughput.py` (protocol.py), in its own
environment.

The model is the folder `ov` beside the base model's, made once per fixture (the base needs a tokenizer for it):

    optimum-cli export openvino --model FIXTURE/base --task text-generation-with-past --weight-format fp32 FIXTURE/ov

A call takes one set of adapters for all its requests, so a mixed batch is one call per adapter, one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.protocol import Job, serve

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
KV_CACHE_GB = 1


class OpenvinoEngine:
    def __init__(self, job: Job) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.genai = openvino_genai
        self.version = openvino_genai.__version__
        model = Path(job.base).parent / "ov"
        if not (model / "openvino_model.xml").exists():
            raise SystemExit(f"{model} is not there; make it:{(__doc__ or '').split(':', 1)[1].splitlines()[2]}")
        self.prompts = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in job.prompts]
        # GenAI reads no adapter_config.json: the caller says how strong an adapter is. Registered at 0, each call sets
        # its own.
        self.adapters = {i: openvino_genai.Adapter(str(_weights(job.adapters[i]))) for i in job.used}
        self.scaling = {i: _scaling(job.adapters[i]) for i in job.used}
        registered = openvino_genai.AdapterConfig()
        for adapter in self.adapters.values():
            registered.add(adapter, 0.0)
        properties = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[job.dtype],
            "KV_CACHE_PRECISION": PRECISIONS[job.dtype],
            "INFERENCE_NUM_THREADS": job.threads,
            "adapters": registered,
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model), self._scheduler(len(job.prompts)), "CPU", properties
        )

    def _scheduler(self, num_requests: int) -> Any:
        scheduler = self.genai.SchedulerConfig()
        scheduler.cache_size = KV_CACHE_GB
        scheduler.max_num_seqs = num_requests
        scheduler.enable_prefix_caching = False
        return scheduler

    def generate(self, chosen: Sequence[int | None], output_len: int) -> list[list[int]]:
        outputs: dict[int, list[int]] = {}
        for adapter in dict.fromkeys(chosen):
            rows = [row for row, index in enumerate(chosen) if index == adapter]
            config = self._generation(adapter, output_len)
            results = self.pipeline.generate([self.prompts[row] for row in rows], [config] * len(rows))
            outputs |= {row: list(result.m_generation_ids[0]) for row, result in zip(rows, results, strict=True)}
        return [outputs[row] for row in range(len(chosen))]

    def _generation(self, adapter: int | None, output_len: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_len, True, False
        config.adapters = self.genai.AdapterConfig()
        if adapter is not None:
            config.adapters.add(self.adapters[adapter], self.scaling[adapter])
        return config


def _weights(adapter: str) -> Path:
    return Path(adapter) / "adapter_model.safetensors"


def _scaling(adapter: str) -> float:
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    return float(config["lora_alpha"]) / float(config["r"])


if __name__ == "__main__":
    serve(OpenvinoEngine, __doc__)
