"""What schemathesis cannot read in a JSON schema: why a request of the right form is refused all the same."""

from __future__ import annotations

import json
import re
from typing import Any

import schemathesis

REASONS = re.compile(
    "|".join(
        (
            r"valid integer|922337203685477580[78]",  # 1.0 is none here, and is one in JSON Schema
            r"may load|no_adapter_output_dir|--adapter-root",  # places of this server
            r"keeps no tenants|where there are tenants",
            r"vocabulary|tokens|context|prompt",  # of this model
            r"chat template",
            r"any longer|of a page",  # where a list goes on
            r"loaded already|is loaded|not loaded|belongs to adapter",
            r"(adapter|tenant) .*name|a name has|named? ",
            r"adapters? twice|one adapter|mix",
            r"needs? |exclude|send one|leave it out|not both",  # fields that say more than a schema of theirs
            r"was expected|sha256|digest|not safetensors|is truncated|is empty",  # of the body
            r"comes before|fields come first",
            r"of no use|is needed|ids and \d+ weights|^best_of=",  # one field says what another must be
            r"schema|regex|grammar|json",  # forms
            r"numbers are the operator's",  # of this key
            r"has lora_int_id \d+, not",  # of this adapter
            r"stands for control characters",  # in what a query has beside the parameters of its route
            r"other side of the conversation|at most \d+|not available in a stream|^input: List should have at least 1",
        )
    )
)


@schemathesis.hook
def filter_case(ctx: Any, case: Any) -> bool:
    """Not those whose only mistake is a header more: HTTP has a server pass over what it does not know."""
    data = getattr(getattr(getattr(case, "meta", None), "phase", None), "data", None)
    description = getattr(data, "description", None) or ""
    return (
        not (data.parameter_location == "header" and "unexpected properties" in description.lower()) if data else True
    )


@schemathesis.check
def valid_data_is_refused_for_a_known_reason(ctx: Any, response: Any, case: Any) -> None:
    """A request that fits its schema is 400 for one of REASONS alone."""
    meta = getattr(case, "meta", None)
    if response.status_code != 400 or meta is None or not meta.generation.mode.is_positive:
        return
    found = response.json()
    error = found.get("error", found.get("error_message", ""))
    message = error["message"] if isinstance(error, dict) else error
    if not REASONS.search(message):
        raise AssertionError(f"a request of the right form is refused: {json.dumps(message)}")
