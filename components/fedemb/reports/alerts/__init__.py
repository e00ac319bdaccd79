"""Alerts on refusals, failures, approvals and budgets: webhook, Slack and e-mail."""
