-- What the expiry sweep looks through: reserved orders only, by the end of their hold.
CREATE INDEX orders_orders_hold ON orders_orders (hold_expires_at) WHERE status = 'reserved';
