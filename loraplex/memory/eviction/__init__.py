"""What leaves a tier when room is short: the order (policies) and the rules (room). It decides and moves nothing."""
