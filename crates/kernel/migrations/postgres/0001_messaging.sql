-- The kernel's tables. Bodies are bytes, not jsonb: they are stored as they arrived.

CREATE TABLE messaging_outbox (
    id             uuid        PRIMARY KEY,
    event_id       uuid        NOT NULL,
    kind           text        NOT NULL CHECK (kind IN ('event', 'retry', 'redrive', 'replay')),
    group_id       text        NOT NULL,
    subsidiary_id  text,
    aggregate_type text        NOT NULL,
    aggregate_id   text        NOT NULL,
    event_type     text        NOT NULL,
    body           bytea       NOT NULL,
    headers        text        NOT NULL,
    status         text        NOT NULL CHECK (status IN ('pending', 'published', 'failed', 'dead')),
    available_at   timestamptz NOT NULL,
    claimed_at     timestamptz,
    claimed_by     uuid,
    attempts       integer     NOT NULL DEFAULT 0,
    created_at     timestamptz NOT NULL,
    published_at   timestamptz,
    correlation_id text        NOT NULL,
    causation_id   uuid,
    traceparent    text,
    target         text        NOT NULL DEFAULT '',
    last_error     text
);
CREATE INDEX messaging_outbox_due ON messaging_outbox (available_at) WHERE status IN ('pending', 'failed');
CREATE INDEX messaging_outbox_dead ON messaging_outbox (id) WHERE status = 'dead';
CREATE INDEX messaging_outbox_aggregate ON messaging_outbox (aggregate_type, aggregate_id);
-- Retries, redrives and replays by their event; a first publication is found by its id.
CREATE INDEX messaging_outbox_copies ON messaging_outbox (event_id) WHERE kind <> 'event';

-- Events published long ago. Replays read them too.
CREATE TABLE messaging_outbox_archive (
    id             uuid    NOT NULL PRIMARY KEY,
    group_id       text    NOT NULL,
    subsidiary_id  text,
    aggregate_type text    NOT NULL,
    aggregate_id   text    NOT NULL,
    event_type     text    NOT NULL,
    headers        text    NOT NULL,
    attempts       integer NOT NULL,
    created_at     timestamptz NOT NULL,
    claimed_at     timestamptz,
    published_at   timestamptz,
    correlation_id text    NOT NULL,
    causation_id   uuid,
    traceparent    text,
    body           bytea   NOT NULL
);
CREATE INDEX messaging_outbox_archive_aggregate ON messaging_outbox_archive (aggregate_type, aggregate_id);

CREATE TABLE messaging_inbox (
    consumer        text        NOT NULL,
    event_id        uuid        NOT NULL,
    state           text        NOT NULL CHECK (state IN ('processing', 'processed', 'waiting', 'retrying', 'dead')),
    attempts        integer     NOT NULL,
    unfinished_runs integer     NOT NULL DEFAULT 0,
    duplicates      integer     NOT NULL DEFAULT 0,
    started_at      timestamptz NOT NULL,
    finished_at     timestamptz,
    lock_token      uuid,
    lease_until     timestamptz,
    version         bigint      NOT NULL DEFAULT 0,
    -- Writes about an external effect that came after another instance had taken it over, and were refused.
    fenced          integer     NOT NULL DEFAULT 0,
    event_type      text        NOT NULL,
    aggregate_id    text        NOT NULL,
    correlation_id  text        NOT NULL,
    group_id        text        NOT NULL,
    traceparent     text,
    body_hash       bytea       NOT NULL,
    reason          text,
    last_error      text,
    body            bytea,
    waiting_for     text,
    deadline_at     timestamptz,
    PRIMARY KEY (consumer, event_id)
);
CREATE INDEX messaging_inbox_unsettled ON messaging_inbox (consumer, state, event_id) WHERE state <> 'processed';
CREATE INDEX messaging_inbox_duplicates ON messaging_inbox (consumer, event_id) WHERE duplicates > 0;
-- Waiting events are found by what they wait for and by their deadline.
CREATE INDEX messaging_inbox_waiting ON messaging_inbox (consumer, waiting_for) WHERE state = 'waiting';
CREATE INDEX messaging_inbox_due ON messaging_inbox (consumer, lease_until) WHERE state = 'waiting';
-- Old rows are found by the time in their UUIDv7. Foreign ids may have none, so only those are indexed by time.
CREATE INDEX messaging_inbox_foreign ON messaging_inbox (finished_at) WHERE get_byte(uuid_send(event_id), 6) >> 4 <> 7;

CREATE TABLE messaging_dead_letters (
    id             uuid        PRIMARY KEY,
    queue          text        NOT NULL,
    consumer       text        NOT NULL,
    message_id     text,
    -- The event in its body, if that can be read: the event's inbox row is kept as long as the letter.
    event_id       uuid,
    event_type     text,
    correlation_id text,
    group_id       text,
    reason         text        NOT NULL,
    error          text        NOT NULL,
    attempts       integer     NOT NULL,
    headers        text        NOT NULL,
    body           bytea       NOT NULL,
    x_death        text        NOT NULL,
    count          integer     NOT NULL DEFAULT 1,
    state          text        NOT NULL CHECK (state IN ('open', 'redriven', 'discarded')),
    -- What makes two filings the same letter while it is open: the event a verdict was on, else the delivery.
    filing_key     text        NOT NULL,
    -- The rejected delivery filed last; filing the same one again changes nothing.
    delivery_key   text        NOT NULL,
    created_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL,
    resolved_at    timestamptz,
    -- The job that redrove it, if it was not redriven by itself.
    job_id         uuid,
    UNIQUE (queue, delivery_key)
);
CREATE UNIQUE INDEX messaging_dead_letters_open ON messaging_dead_letters (queue, filing_key) WHERE state = 'open';
CREATE INDEX messaging_dead_letters_event ON messaging_dead_letters (event_id, consumer);
CREATE INDEX messaging_dead_letters_resolved ON messaging_dead_letters (resolved_at) WHERE state <> 'open';
-- Covers the groups of letters: no body is read to count them.
CREATE INDEX messaging_dead_letters_groups
    ON messaging_dead_letters (state, consumer, reason, event_type, queue, created_at, updated_at);
CREATE INDEX messaging_dead_letters_by_message ON messaging_dead_letters (message_id);
CREATE INDEX messaging_dead_letters_by_reason ON messaging_dead_letters (consumer, reason) WHERE state = 'open';

-- The table queue. A message from the outbox is a reference to its row there; one from elsewhere brings its own
-- columns. So rows stay narrow, and the claim updates no indexed column: with room on the page it is a cheap update.
CREATE TABLE messaging_queue (
    id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue          text        NOT NULL,
    outbox_ref     uuid,
    message_id     text,
    routing_key    text,
    correlation_id text,
    headers        text,
    body           bytea,
    x_death        text,
    enqueued_at    timestamptz NOT NULL,
    lock_token     uuid,
    lease_until    timestamptz,
    deliveries     integer     NOT NULL DEFAULT 0,
    CHECK ((outbox_ref IS NULL) <> (body IS NULL))
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX messaging_queue_by_queue ON messaging_queue (queue, id);

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

-- The routing keys of each queue. An event is owed to a consumer if its queue was bound to the event's key by then.
CREATE TABLE messaging_bindings (
    routing_key text        NOT NULL,
    queue       text        NOT NULL,
    since       timestamptz NOT NULL,
    PRIMARY KEY (routing_key, queue)
);

-- Queues found missing on the broker, recorded before they are declared: what they lost is still to be sent again. `id` is
-- new each time.
CREATE TABLE messaging_resyncs (
    queue text NOT NULL PRIMARY KEY,
    id    uuid NOT NULL
);

-- Who takes from which queue, renewed while it does.
CREATE TABLE messaging_subscriptions (
    id      uuid        PRIMARY KEY,
    queue   text        NOT NULL,
    seen_at timestamptz NOT NULL
);

CREATE TABLE messaging_pauses (
    name      text        PRIMARY KEY,
    paused_at timestamptz NOT NULL
);

-- What operators did, when and why. `group_id` is null for actions on every group.
CREATE TABLE messaging_actions (
    id         uuid    NOT NULL PRIMARY KEY,
    who        text    NOT NULL,
    group_id   text,
    action     text    NOT NULL,
    subject    text    NOT NULL,
    why        text,
    details    text    NOT NULL,
    request_id text    NOT NULL,
    created_at timestamptz NOT NULL
);
CREATE INDEX messaging_actions_subject ON messaging_actions (subject, id);

-- Work that outlives a request: redrives and replays. A batch of it and its progress are one commit.
CREATE TABLE messaging_jobs (
    id              uuid    NOT NULL PRIMARY KEY,
    kind            text    NOT NULL CHECK (kind IN ('redrive', 'replay')),
    group_id        text,
    state           text    NOT NULL CHECK (state IN ('running', 'done', 'stopped', 'failed')),
    criteria        text    NOT NULL,
    rate            bigint NOT NULL CHECK (rate > 0),
    total           bigint NOT NULL,
    sent            bigint  NOT NULL DEFAULT 0,
    already_applied bigint  NOT NULL DEFAULT 0,
    skipped         bigint  NOT NULL DEFAULT 0,
    refused         bigint  NOT NULL DEFAULT 0,
    -- How far a replay has come.
    reached         uuid,
    next_at         timestamptz NOT NULL,
    who             text    NOT NULL,
    why             text,
    last_error      text,
    created_at      timestamptz NOT NULL,
    finished_at     timestamptz
);
CREATE INDEX messaging_jobs_running ON messaging_jobs (next_at) WHERE state = 'running';

-- What a redrive has still to do: the letters that were open when it was asked for.
CREATE TABLE messaging_job_letters (
    job_id    uuid NOT NULL,
    letter_id uuid NOT NULL,
    PRIMARY KEY (job_id, letter_id)
);

-- The processes that run, renewed while they do. `loops`: how each of a process's loops says it is doing, as JSON.
CREATE TABLE messaging_instances (
    id         uuid        NOT NULL PRIMARY KEY,
    address    text        NOT NULL,
    version    text        NOT NULL,
    started_at timestamptz NOT NULL,
    seen_at    timestamptz NOT NULL,
    loops      text        NOT NULL
);

-- What retention has removed for good. Checks for missing rows look only at rows after `until`. An unknown event from before
-- `removed_until` may have been processed; null while nothing has been removed.
CREATE TABLE messaging_forgotten (
    what          text NOT NULL PRIMARY KEY CHECK (what IN ('events', 'verdicts', 'letters')),
    until         timestamptz NOT NULL,
    removed_until timestamptz
);
INSERT INTO messaging_forgotten (what, until) SELECT what, now() FROM unnest(ARRAY['events', 'verdicts', 'letters']) AS what;
