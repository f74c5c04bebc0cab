"""What came out: likelihood under causal routing, baselines, routing metrics, generation, reports."""
