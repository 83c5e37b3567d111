"""When and how: fragments, schedules, outer optimizers and the engine that drives them."""
