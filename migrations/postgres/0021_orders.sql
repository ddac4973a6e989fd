-- Keys are forgotten by their age.
CREATE INDEX orders_idempotency_created ON orders_idempotency (created_at);
