-- Messages that one transaction handed to a consumer of its own process, in one row: their outbox rows, by which whoever
-- finds the row when its lease is over puts them into the queue, each for itself.
CREATE TABLE messaging_bundles (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue       text        NOT NULL,
    outbox_refs uuid[]      NOT NULL,
    enqueued_at timestamptz NOT NULL,
    lock_token  uuid        NOT NULL,
    lease_until timestamptz NOT NULL
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX messaging_bundles_by_queue ON messaging_bundles (queue);
