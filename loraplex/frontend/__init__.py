"""What callers hold: the offline `LLM`, the asynchronous engine of servers, and the engine process between them."""
