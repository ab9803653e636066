"""Grammars in the EBNF of SGLang (GBNF: `root ::= ...`) in Lark's notation, as llguidance's own rewriting has them."""

from __future__ import annotations

from loraplex.errors import InvalidRequestError, shown


def lark_of(ebnf: str) -> str:
    """The grammar from `start`. Takes time with lines times bytes: bound both before.

    Raises InvalidRequestError for a text that is no such grammar.
    """
    from llguidance.gbnf_to_lark import any_to_lark  # few servers need it

    if "::=" not in ebnf:
        raise InvalidRequestError("ebnf has no rule: write root ::= ...", param="ebnf")
    try:
        grammar: str = any_to_lark(ebnf)
    except RecursionError:
        raise InvalidRequestError("ebnf is nested too deeply", param="ebnf") from None
    except Exception as error:  # the library has no class of its own for all of them
        raise InvalidRequestError(f"ebnf is no grammar: {shown(str(error))}", param="ebnf") from None
    return grammar.removeprefix("%llguidance {}").lstrip()
