"""Where time goes, and how adapters fare: what a profile of a running engine records, and its report.

    profiler.py    seconds by part of a step, always measured          steps.py      steps, summed by kind
    requests.py    first token, between tokens, end to end             histogram.py  durations in few bytes
    profile.py     one profile: before, what happens, after            report.py     its report
    findings.py    what a report shows, in words                       settings.py   what `loraplex profile` takes

Elsewhere are its surfaces: the command (`loraplex/profile.py`), the route (`server/profile_api.py`), the pictures
(`views/live_profile.py`, `views/html_report.py`), and what measures kernels (`kernels/profiled.py`,
`models/speedup.py`). Standard library only.
"""
