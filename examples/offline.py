"""One batch, four prompts, three adapters and the base model; where the adapters are: `python examples/offline.py`."""

from __future__ import annotations

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.demo.tasks import adapter_path, assets_path

ADAPTERS = ("upper", "reverse", "rot13")


def main() -> None:
    lora_requests = [
        None,  # the base model
        *(LoRARequest(name, number, str(adapter_path(name))) for number, name in enumerate(ADAPTERS, start=1)),
    ]
    prompts = ["good morning="] * len(lora_requests)
    with LLM(str(assets_path() / "base")) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32), lora_request=lora_requests)
        llm.evict_lora(1)
        device, host = (llm.memory_report().tier(name) for name in ("device", "host"))
    for output in outputs:
        name = output.lora_request.lora_name if output.lora_request else "base"
        print(f"{name:8} {output.prompt} {output.outputs[0].text}")
    print(f"after an eviction {device.num_adapters} adapters are on the device, {host.num_adapters} in host memory")


if __name__ == "__main__":
    main()
