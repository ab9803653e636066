"""`loraplex route`: one HTTP address in front of several replicas of `loraplex serve`."""
