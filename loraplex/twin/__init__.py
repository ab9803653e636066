"""The digital twin: engines without a model, whose steps take what a calibration says, on a clock of their own.

calibration.py  what one machine takes for a step, a load, an adapter's bytes; a JSON file
calibrate.py    makes it, with a real engine
engine.py       the real engine over virtual steps, loads and memory
simulation.py   several of them behind the real placement, on one clock
fleet.py        the same for thousands of replicas, without steps
planning.py     how many devices and which budgets a service level takes
"""
