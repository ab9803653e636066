"""The commands that cli.py names, a file for each group: one is imported when it is called, or asked for its help."""
