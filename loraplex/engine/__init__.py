"""One step on a device: scheduler, batch, model runner, sampler, and what is due between steps."""
