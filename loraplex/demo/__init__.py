"""The demonstration: a tiny base model, its adapters, and the tasks that they were trained for."""
