//! Numbers people read: `ORD-7K3M9Q2A`, eight Crockford base32 digits beside the uuid.
//!
//! A process counts upwards from a random start and jumps to another after a while: neighbours in time are
//! neighbours in the index, which keeps inserts cheap however many rows there are, and two processes hardly ever
//! meet. If they do, the unique key says so and the number is minted again.

use std::sync::Mutex;
use std::sync::PoisonError;

use rand::RngExt;

const DIGITS: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
const NUMBER_BITS: u32 = 40;
/// How many numbers are counted off from one random start.
const RUN_LENGTH: u64 = 4096;

#[derive(Debug)]
pub struct Numbers {
    prefix: &'static str,
    run: Mutex<Run>,
}

#[derive(Debug)]
struct Run {
    next: u64,
    left: u64,
}

impl Numbers {
    pub fn new(prefix: &'static str) -> Self {
        Self { prefix, run: Mutex::new(Run { next: 0, left: 0 }) }
    }

    /// Counts from `start`; for tests that need two to meet.
    pub fn starting_at(prefix: &'static str, start: u64) -> Self {
        Self { prefix, run: Mutex::new(Run { next: start, left: 1 }) }
    }

    pub fn mint(&self) -> String {
        let mut run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        if run.left == 0 {
            *run = Run { next: rand::rng().random_range(0..1 << NUMBER_BITS), left: RUN_LENGTH };
        }
        let number = run.next;
        run.left -= 1;
        run.next = (run.next + 1) % (1 << NUMBER_BITS);
        self.write(number)
    }

    fn write(&self, number: u64) -> String {
        let mut text = String::with_capacity(self.prefix.len() + 9);
        text.push_str(self.prefix);
        text.push('-');
        for digit in (0..8).rev() {
            text.push(char::from(DIGITS[(number >> (digit * 5) & 31) as usize]));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_eight_digits_and_do_not_repeat() {
        let numbers = Numbers::new("ORD");
        let minted: std::collections::HashSet<String> = (0..10_000).map(|_| numbers.mint()).collect();
        assert_eq!(minted.len(), 10_000);
        assert!(minted.iter().all(|number| number.len() == 12 && number.starts_with("ORD-")));
    }

    #[test]
    fn digits_are_crockfords() {
        let numbers = Numbers::new("RES");
        assert_eq!(numbers.write(0), "RES-00000000");
        assert_eq!(numbers.write(31), "RES-0000000Z");
        assert_eq!(numbers.write((1 << NUMBER_BITS) - 1), "RES-ZZZZZZZZ");
    }
}
