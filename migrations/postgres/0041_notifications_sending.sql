-- What a channel outside the database needs: an attempt that ended nobody knows how, why a notice is not sent, and
-- since when it is in its state (since it was written, if that is empty).
ALTER TABLE notifications_notices ADD COLUMN in_doubt boolean NOT NULL DEFAULT false;
ALTER TABLE notifications_notices ADD COLUMN last_error text;
ALTER TABLE notifications_notices ADD COLUMN updated_at timestamptz;
