"""An application on Ray Serve: what decides without Ray, and the whole of it on a real local Ray (-m ray)."""
