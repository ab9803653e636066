"""Where adapters come from without a load: sources that the operator named, and files that clients uploaded."""
