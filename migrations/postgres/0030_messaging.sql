-- What looking at the kernel needs: instances, who has been bound to what since when, and letters by event.

-- The processes that run, renewed while they do. `loops`: how each of a process's loops says it is doing, as JSON.
CREATE TABLE messaging_instances (
    id         uuid        NOT NULL PRIMARY KEY,
    address    text        NOT NULL,
    version    text        NOT NULL,
    started_at timestamptz NOT NULL,
    seen_at    timestamptz NOT NULL,
    loops      text        NOT NULL
);

-- An event is owed to a consumer only if it was bound to the event's type by then.
CREATE TABLE messaging_bound (
    queue       text        NOT NULL,
    routing_key text        NOT NULL,
    since       timestamptz NOT NULL,
    PRIMARY KEY (queue, routing_key)
);

CREATE INDEX messaging_dead_letters_by_message ON messaging_dead_letters (message_id);
CREATE INDEX messaging_dead_letters_by_reason ON messaging_dead_letters (consumer, reason) WHERE state = 'open';
