"""Where each adapter's weights are and how they get there: the records, the transitions between tiers, and the one
lock."""
