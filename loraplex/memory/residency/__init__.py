"""Where each adapter's weights are and how they get there: records, transitions between tiers, and the one lock."""
