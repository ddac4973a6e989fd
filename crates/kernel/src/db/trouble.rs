//! What a database error means for whoever met it.

use super::sqlite::SqliteError;

/// Did the disk fail to sync? Then nothing it said before can be trusted, and trying again would hide it.
pub(super) fn is_failed_fsync(error: &sqlx::Error) -> bool {
    const IOERR_FSYNC: [i32; 2] = [10 | 4 << 8, 10 | 5 << 8]; // FSYNC, DIR_FSYNC
    error
        .as_database_error()
        .and_then(|error| error.try_downcast_ref::<SqliteError>())
        .is_some_and(|error| IOERR_FSYNC.contains(&error.extended_code()))
}

/// What to do about a database error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// Another transaction was in the way: run the same work again.
    Conflict,
    /// Locked by somebody for longer than we wait: come back later.
    Busy,
    /// The statement ran for longer than it may, and not because it waited for a lock: that has a shorter limit. The database
    /// may be slow, or what was asked of it too much.
    TimedOut,
    /// Unreachable, full, read-only, out of memory, damaged or shutting down: come back later.
    Away,
    /// The statement itself is at fault; running it again would fail again.
    Statement,
}

impl Trouble {
    pub fn of(error: &sqlx::Error) -> Self {
        match error {
            sqlx::Error::Database(error) => match error.try_downcast_ref::<SqliteError>() {
                Some(error) => Self::of_sqlite(error.extended_code()),
                None => Self::of_postgres(&error.code().unwrap_or_default()),
            },
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed
            | sqlx::Error::BeginFailed => Self::Away,
            _ => Self::Statement,
        }
    }

    /// Is this about the database's condition rather than about what we asked of it?
    pub fn is_passing(self) -> bool {
        self != Self::Statement
    }

    /// Extended result codes carry the primary one in their low byte.
    fn of_sqlite(code: i32) -> Self {
        match code & 0xff {
            5 | 6 => Self::Busy, // BUSY, LOCKED
            // NOMEM, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, PROTOCOL, AUTH, NOTADB
            7 | 8 | 10 | 11 | 13 | 14 | 15 | 23 | 26 => Self::Away,
            _ => Self::Statement,
        }
    }

    fn of_postgres(code: &str) -> Self {
        match code {
            "40001" | "40P01" => Self::Conflict,
            "55P03" => Self::Busy,           // lock_not_available
            "57014" => Self::TimedOut,       // query_canceled (statement_timeout)
            "25006" => Self::Away,           // read_only_sql_transaction: a failover in progress
            "XX001" | "XX002" => Self::Away, // data_corrupted, index_corrupted
            // connection trouble, out of resources, operator intervention, system error
            _ if ["08", "53", "57", "58"].contains(&code.get(..2).unwrap_or_default()) => Self::Away,
            _ => Self::Statement,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sqlstate_has_its_kind() {
        for (kind, codes) in [
            (Trouble::Conflict, ["40001", "40P01"].as_slice()),
            (Trouble::Busy, &["55P03"]),
            (Trouble::TimedOut, &["57014"]),
            (Trouble::Away, &["25006", "XX001", "XX002"]),
            // connection_exception, connection_does_not_exist, connection_failure, rejected, unknown resolution
            (Trouble::Away, &["08000", "08001", "08003", "08004", "08006", "08007", "08P01"]),
            // insufficient_resources, disk_full, out_of_memory, too_many_connections, configuration_limit_exceeded
            (Trouble::Away, &["53000", "53100", "53200", "53300", "53400"]),
            // operator_intervention, admin_shutdown, crash_shutdown, cannot_connect_now, database_dropped, idle timeout
            (Trouble::Away, &["57000", "57P01", "57P02", "57P03", "57P04", "57P05"]),
            // system_error, io_error
            (Trouble::Away, &["58000", "58030"]),
            // Class 25 is about transactions, 55 about objects, XX about bugs: of these only the codes above pass.
            (Trouble::Statement, &["25001", "25P02", "55000", "55006", "XX000"]),
            (Trouble::Statement, &["22001", "23502", "23505", "23514", "40002", "42601", "42P01", "P0001", "", "5"]),
        ] {
            for code in codes {
                assert_eq!(Trouble::of_postgres(code), kind, "{code}");
            }
        }
    }

    #[test]
    fn a_full_disk_is_away_on_both_databases() {
        assert_eq!(Trouble::of_sqlite(13), Trouble::Away);
        assert_eq!(Trouble::of_postgres("53100"), Trouble::Away);
    }

    /// Each message would use its attempts up on it, and a whole queue die of one bad page.
    #[test]
    fn a_damaged_file_is_no_fault_of_what_was_asked() {
        assert_eq!(Trouble::of_sqlite(11 | 1 << 8), Trouble::Away); // CORRUPT_VTAB
        assert_eq!(Trouble::of_postgres("XX001"), Trouble::Away);
    }

    #[test]
    fn extended_sqlite_codes_count_by_their_low_byte() {
        assert_eq!(Trouble::of_sqlite(5 | 2 << 8), Trouble::Busy); // BUSY_SNAPSHOT
        assert_eq!(Trouble::of_sqlite(19 | 6 << 8), Trouble::Statement); // CONSTRAINT_PRIMARYKEY
    }

    #[test]
    fn deadlocks_run_again_and_constraint_failures_do_not() {
        assert_eq!(Trouble::of_postgres("40P01"), Trouble::Conflict);
        assert_eq!(Trouble::of_postgres("23505"), Trouble::Statement);
    }
}
