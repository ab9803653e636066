"""Requests that wait: in which order they are admitted, and what each tenant was served."""
