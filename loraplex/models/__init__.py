"""One decoder for every family: `config` (families as data), `decoder`, `loader`."""
