"""A running server as a person looks at it: a live view in a terminal, a profile as a page with charts."""
