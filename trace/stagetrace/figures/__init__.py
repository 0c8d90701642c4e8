"""Pictures of a recording, each with a table that says the same in text. They need matplotlib; the tables do not."""

from stagetrace.figures.blocks import block_map, block_map_table
from stagetrace.figures.breakdown import latency_breakdown, latency_breakdown_table
from stagetrace.figures.budget import token_budget, token_budget_table
from stagetrace.figures.lanes import process_lanes, process_lanes_table
from stagetrace.figures.timeline import request_timeline, request_timeline_table

__all__ = [
    "block_map",
    "block_map_table",
    "latency_breakdown",
    "latency_breakdown_table",
    "process_lanes",
    "process_lanes_table",
    "request_timeline",
    "request_timeline_table",
    "token_budget",
    "token_budget_table",
]
