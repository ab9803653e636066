"""Tools: what a request says of them, and how the calls and the thoughts in an answer are told from its text.

Parsers are pure functions over text that comes in pieces: the same text gives the same, wherever it is cut, in time
proportional to its length.
"""
