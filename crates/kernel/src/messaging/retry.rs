//! When to try again: exponential backoff with jitter, and a cap on both delay and attempts.

use std::time::Duration;

use rand::RngExt;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    pub base: Duration,
    pub cap: Duration,
    pub attempts_max: u32,
}

impl Backoff {
    /// The delay after the `attempts`th failure, spread so that what failed together does not return together.
    /// `None` once the attempts are used up.
    pub fn delay(&self, attempts: u32) -> Option<Duration> {
        (attempts < self.attempts_max).then(|| {
            let ceiling = self.ceiling(attempts);
            ceiling.mul_f64(rand::rng().random_range(0.5..=1.0))
        })
    }

    /// The longest time from the first failure to the last attempt.
    pub fn horizon(&self) -> Duration {
        (1..self.attempts_max).map(|attempts| self.ceiling(attempts)).sum()
    }

    /// The longest delay after the `attempts`th failure.
    fn ceiling(&self, attempts: u32) -> Duration {
        self.base.saturating_mul(2u32.saturating_pow(attempts.min(31))).min(self.cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff { base: Duration::from_secs(5), cap: Duration::from_secs(900), attempts_max: 10 };

    #[test]
    fn delays_double_up_to_the_cap() {
        assert_eq!(BACKOFF.ceiling(1), Duration::from_secs(10));
        assert_eq!(BACKOFF.ceiling(3), Duration::from_secs(40));
        assert_eq!(BACKOFF.ceiling(9), Duration::from_secs(900));
        assert_eq!(BACKOFF.ceiling(u32::MAX), Duration::from_secs(900));
    }

    #[test]
    fn the_horizon_is_the_sum_of_all_delays() {
        let backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(4), attempts_max: 4 };
        assert_eq!(backoff.horizon(), Duration::from_secs(2 + 4 + 4));
        assert_eq!(Backoff { attempts_max: 1, ..backoff }.horizon(), Duration::ZERO);
    }

    #[test]
    fn jitter_stays_between_half_and_whole() {
        for _ in 0..200 {
            let delay = BACKOFF.delay(2).unwrap();
            assert!(delay >= Duration::from_secs(10) && delay <= Duration::from_secs(20), "{delay:?}");
        }
    }

    #[test]
    fn there_is_no_delay_after_the_last_attempt() {
        assert!(BACKOFF.delay(9).is_some());
        assert!(BACKOFF.delay(10).is_none());
    }
}
