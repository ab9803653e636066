"""One engine: scheduler, batch, model runner, sampler, and the text on either side of it."""
