"""`verify`: the tree engine against every rollout run alone through the unmodified model."""
