"""Multi-head chain of thought: answers by stage, each stage with a head and the earlier stages' context."""
