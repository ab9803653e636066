"""How adapters fare: what a profile of a running engine records, and the report with findings that it becomes. Standard
library only."""
