"""What an operator's systems collect beside the metrics of the engine: series of adapters and tenants, and traces."""
