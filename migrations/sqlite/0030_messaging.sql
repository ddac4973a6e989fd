-- What looking at the kernel needs: instances, who has been bound to what since when, and letters by event.

-- The processes that run, renewed while they do. `loops`: how each of a process's loops says it is doing, as JSON.
CREATE TABLE messaging_instances (
    id         BLOB    NOT NULL PRIMARY KEY,
    address    TEXT    NOT NULL,
    version    TEXT    NOT NULL,
    started_at INTEGER NOT NULL,
    seen_at    INTEGER NOT NULL,
    loops      TEXT    NOT NULL
) STRICT;

-- An event is owed to a consumer only if it was bound to the event's type by then.
CREATE TABLE messaging_bound (
    queue       TEXT    NOT NULL,
    routing_key TEXT    NOT NULL,
    since       INTEGER NOT NULL,
    PRIMARY KEY (queue, routing_key)
) STRICT, WITHOUT ROWID;

CREATE INDEX messaging_dead_letters_by_message ON messaging_dead_letters (message_id);
CREATE INDEX messaging_dead_letters_by_reason ON messaging_dead_letters (consumer, reason) WHERE state = 'open';
