"""Moving KV pages between workers: layouts, tickets, leases, receptions and transports. Knows no request and no
scheduler.
"""
