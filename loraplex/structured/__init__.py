"""Outputs in a form that the request names: a JSON schema, a regular expression, a choice, or a grammar.

`params` has what a request asks, `grammars` makes token masks of it with llguidance. No torch.
"""
