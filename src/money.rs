//! Amounts as people read them. Within, money is whole minor units ([decision 0007](../docs/decisions/0007-money-in-minor-units.md)).

/// By ISO 4217 a minor unit is a hundredth of the major one, but for these.
const OTHER_DIGITS: [(usize, &[&str]); 3] = [
    (
        0,
        &[
            "BIF", "CLP", "DJF", "GNF", "ISK", "JPY", "KMF", "KRW", "PYG", "RWF", "UGX", "UYI", "VND", "VUV", "XAF",
            "XOF", "XPF",
        ],
    ),
    (3, &["BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"]),
    (4, &["CLF", "UYW"]),
];

/// `12.50 USD` for 1250 of them.
pub fn in_major(minor: i64, currency: &str) -> String {
    let others = OTHER_DIGITS.iter().find(|(_, currencies)| currencies.contains(&currency));
    let digits = others.map_or(2, |(digits, _)| *digits);
    let sign = if minor < 0 { "-" } else { "" };
    // One digit before the point at least.
    let padded = format!("{:0>width$}", minor.unsigned_abs(), width = digits + 1);
    let (major, rest) = padded.split_at(padded.len() - digits);
    let point = if digits == 0 { "" } else { "." };
    format!("{sign}{major}{point}{rest} {currency}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_point_is_where_the_currency_has_it() {
        assert_eq!(in_major(1250, "USD"), "12.50 USD");
        assert_eq!(in_major(-5, "EUR"), "-0.05 EUR");
        assert_eq!(in_major(0, "USD"), "0.00 USD");
        assert_eq!(in_major(1250, "JPY"), "1250 JPY");
        assert_eq!(in_major(1250, "KWD"), "1.250 KWD");
        assert_eq!(in_major(i64::MIN, "USD"), "-92233720368547758.08 USD");
    }
}
