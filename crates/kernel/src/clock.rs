//! Time and ids, handed in rather than taken from the air, so that tests decide both.
//!
//! A [`Timestamp`] is whole milliseconds: Postgres keeps it as `timestamptz`, SQLite as an integer that sorts,
//! the API as RFC 3339 in UTC.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::types::{FromSql, FromSqlResult, ToSql, ToSqlOutput, ValueRef};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgHasArrayType, PgTypeInfo};
use sqlx::{Database, Decode, Encode, Postgres, Type};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

/// A moment, in milliseconds since 1970 UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, utoipa::ToSchema)]
#[schema(value_type = String, format = DateTime, example = "2026-11-16T09:30:00.125Z")]
pub struct Timestamp(i64);

/// The bounds of RFC 3339's four-digit years.
const MILLIS_MIN: i64 = -62_167_219_200_000;
const MILLIS_MAX: i64 = 253_402_300_799_999;

impl Timestamp {
    pub const fn from_millis(millis: i64) -> Self {
        Self(if millis < MILLIS_MIN {
            MILLIS_MIN
        } else if millis > MILLIS_MAX {
            MILLIS_MAX
        } else {
            millis
        })
    }

    pub const fn millis(self) -> i64 {
        self.0
    }

    pub fn plus(self, span: Duration) -> Self {
        Self::from_millis(self.0.saturating_add(millis(span)))
    }

    pub fn minus(self, span: Duration) -> Self {
        Self::from_millis(self.0.saturating_sub(millis(span)))
    }

    /// How long ago `earlier` was; zero when the clocks disagree, never negative.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0 - earlier.0).unwrap_or(0))
    }

    fn to_datetime(self) -> OffsetDateTime {
        OffsetDateTime::from_unix_timestamp_nanos(i128::from(self.0) * 1_000_000)
            .expect("from_millis keeps every timestamp within four-digit years")
    }
}

impl From<OffsetDateTime> for Timestamp {
    fn from(moment: OffsetDateTime) -> Self {
        Self::from_millis(i64::try_from(moment.unix_timestamp_nanos() / 1_000_000).unwrap_or(i64::MAX))
    }
}

/// A moment as RFC 3339 has it, with three digits of the second always, so that times also sort as text. Every event and
/// every answer has some, so they are put down digit by digit: a formatter that reads a description took more than a
/// hundredth of all CPU that orders took.
struct Rfc3339Millis([u8; 24]);

impl From<Timestamp> for Rfc3339Millis {
    fn from(moment: Timestamp) -> Self {
        let moment = moment.to_datetime();
        let mut text = *b"0000-00-00T00:00:00.000Z";
        let parts = [
            (0..4, moment.year().unsigned_abs()),
            (5..7, u8::from(moment.month()).into()),
            (8..10, moment.day().into()),
            (11..13, moment.hour().into()),
            (14..16, moment.minute().into()),
            (17..19, moment.second().into()),
            (20..23, moment.millisecond().into()),
        ];
        for (place, mut number) in parts {
            for digit in text[place].iter_mut().rev() {
                *digit += (number % 10) as u8;
                number /= 10;
            }
        }
        Self(text)
    }
}

impl Rfc3339Millis {
    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("digits and what is between them are ASCII")
    }
}

impl std::fmt::Display for Timestamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(Rfc3339Millis::from(*self).as_str())
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(Rfc3339Millis::from(*self).as_str())
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        OffsetDateTime::parse(&text, &Rfc3339).map(Self::from).map_err(de::Error::custom)
    }
}

impl Type<Postgres> for Timestamp {
    fn type_info() -> PgTypeInfo {
        <OffsetDateTime as Type<Postgres>>::type_info()
    }
}

impl PgHasArrayType for Timestamp {
    fn array_type_info() -> PgTypeInfo {
        OffsetDateTime::array_type_info()
    }
}

impl Encode<'_, Postgres> for Timestamp {
    fn encode_by_ref(&self, buf: &mut <Postgres as Database>::ArgumentBuffer) -> Result<IsNull, BoxDynError> {
        Encode::<Postgres>::encode(self.to_datetime(), buf)
    }
}

impl<'r> Decode<'r, Postgres> for Timestamp {
    fn decode(value: <Postgres as Database>::ValueRef<'r>) -> Result<Self, BoxDynError> {
        <OffsetDateTime as Decode<Postgres>>::decode(value).map(Self::from)
    }
}

impl ToSql for Timestamp {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.0.into())
    }
}

impl FromSql for Timestamp {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        i64::column_result(value).map(Self::from_millis)
    }
}

/// Whole milliseconds of a duration, as SQL wants them.
pub fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

/// A span for people, to the second: `90d`, `1h 5m`. Days are the largest unit, because months differ.
pub fn in_words(span: Duration) -> String {
    let seconds = span.as_secs();
    let parts = [(seconds / 86_400, 'd'), (seconds / 3600 % 24, 'h'), (seconds / 60 % 60, 'm'), (seconds % 60, 's')];
    let words: Vec<String> =
        parts.iter().filter(|(count, _)| *count > 0).map(|(count, unit)| format!("{count}{unit}")).collect();
    if words.is_empty() { "0s".to_owned() } else { words.join(" ") }
}

/// Where the time comes from: the machine, or a test that sets it by hand.
#[derive(Debug, Clone, Default)]
pub enum Clock {
    #[default]
    System,
    Manual(Arc<AtomicI64>),
}

impl Clock {
    pub fn manual(start: Timestamp) -> Self {
        Self::Manual(Arc::new(AtomicI64::new(start.millis())))
    }

    #[expect(clippy::disallowed_methods, reason = "the one place that asks the machine for the time")]
    pub fn now(&self) -> Timestamp {
        match self {
            Self::System => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                Timestamp::from_millis(millis(since))
            }
            Self::Manual(now) => Timestamp::from_millis(now.load(Ordering::SeqCst)),
        }
    }

    /// Moves a manual clock on; the machine's clock moves by itself.
    pub fn advance(&self, span: Duration) {
        if let Self::Manual(now) = self {
            now.fetch_add(millis(span), Ordering::SeqCst);
        }
    }
}

/// Mints a UUIDv7: unique everywhere, and growing within a process, so that new rows land together in an index.
#[expect(clippy::disallowed_methods, reason = "the one place that mints ids")]
pub fn mint_id() -> Uuid {
    Uuid::now_v7()
}

/// The lowest UUIDv7 of a moment: those minted before it are lower, those minted from then on are not.
pub fn first_id_at(moment: Timestamp) -> Uuid {
    Uuid::from_u128(u128::from(moment.millis().unsigned_abs() & 0xffff_ffff_ffff) << 80)
}

/// When a UUIDv7 was minted; `None` of an id of another kind.
pub fn minted_at(id: &Uuid) -> Option<Timestamp> {
    let is_v7 = id.get_version() == Some(uuid::Version::SortRand);
    let millis = i64::try_from(id.as_u128() >> 80).unwrap_or(i64::MAX);
    is_v7.then(|| Timestamp::from_millis(millis))
}

#[cfg(test)]
mod tests {
    use time::macros::format_description;

    use super::*;

    #[test]
    fn a_timestamp_reads_back_from_its_text() {
        let moment = Timestamp::from_millis(1_794_821_400_125);
        let text = serde_json::to_string(&moment).unwrap();
        assert_eq!(text, "\"2026-11-16T09:30:00.125Z\"");
        assert_eq!(serde_json::from_str::<Timestamp>(&text).unwrap(), moment);
    }

    #[test]
    fn a_clock_that_runs_back_gives_no_negative_age() {
        assert_eq!(Timestamp::from_millis(5).since(Timestamp::from_millis(9)), Duration::ZERO);
    }

    #[test]
    fn ids_sort_by_the_moment_they_were_minted() {
        let (before, now) = (Clock::System.now(), mint_id());
        assert!(first_id_at(before) <= now && now < first_id_at(before.plus(Duration::from_secs(60))));
        assert!(first_id_at(Timestamp::from_millis(5)) < first_id_at(Timestamp::from_millis(6)));
        assert!(minted_at(&now).unwrap() >= before);
        assert_eq!(minted_at(&Uuid::nil()), None);
    }

    #[test]
    fn spans_are_told_in_days_and_less() {
        let words = |seconds| in_words(Duration::from_secs(seconds));
        assert_eq!(["0s", "1h 5m", "90d", "1d 1s"], [words(0), words(3900), words(90 * 86_400), words(86_401)]);
    }

    #[test]
    fn every_part_of_a_moment_is_in_its_place() {
        let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");
        // The step is no multiple of any unit.
        for millis in (MILLIS_MIN..MILLIS_MAX).step_by(98_765_432_101).chain([MILLIS_MAX]) {
            let moment = Timestamp::from_millis(millis);
            assert_eq!(moment.to_string(), moment.to_datetime().format(&format).unwrap());
        }
    }

    #[test]
    fn absurd_times_stay_printable() {
        let text = |millis| Timestamp::from_millis(millis).to_string();
        assert_eq!(text(i64::MIN), "0000-01-01T00:00:00.000Z");
        assert_eq!(text(i64::MAX), "9999-12-31T23:59:59.999Z");
    }
}
