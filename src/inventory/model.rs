//! The reservation decision, and how far a reservation comes. Pure: no I/O, so that its promises can be tried on
//! thousands of made-up batches.

use std::collections::BTreeMap;

use super::events::Shortage;
use crate::orders::events::{Item, PAID, PLACED, Sku};

/// A SKU of a tenant.
pub type ShelfKey = (String, Sku);

/// What is available, as far as one batch is concerned: the SKUs of each tenant. One that is not here is unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shelf(BTreeMap<String, BTreeMap<Sku, Level>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Level {
    available: i64,
    taken: i64,
}

/// What one order needs: lines of the same SKU summed, in SKU order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand(BTreeMap<Sku, i64>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    Reserved,
    Failed { reason: String, shortages: Vec<Shortage> },
}

impl Demand {
    pub fn of(items: &[Item]) -> Self {
        let mut demand: BTreeMap<Sku, i64> = BTreeMap::new();
        for item in items {
            let sum = demand.entry(item.sku.clone()).or_default();
            *sum = sum.saturating_add(item.quantity.get());
        }
        Self(demand)
    }

    pub fn lines(&self) -> impl Iterator<Item = (&Sku, i64)> {
        self.0.iter().map(|(sku, quantity)| (sku, *quantity))
    }
}

impl Shelf {
    pub fn new(available: impl IntoIterator<Item = (ShelfKey, i64)>) -> Self {
        let mut shelf = Self::default();
        for ((group_id, sku), available) in available {
            shelf.0.entry(group_id).or_default().insert(sku, Level { available, taken: 0 });
        }
        shelf
    }

    /// Takes everything the demand asks for, or nothing.
    pub fn reserve(&mut self, group_id: &str, demand: &Demand) -> Decision {
        let mut levels = self.0.get_mut(group_id);
        let mut reasons = Vec::new();
        let mut shortages = Vec::new();
        for (sku, need) in demand.lines() {
            let (have, word) = match levels.as_ref().and_then(|levels| levels.get(sku)) {
                Some(level) => (level.available, "Insufficient"),
                None => (0, "Unknown SKU"),
            };
            if need > have {
                reasons.push(format!("{word} {sku}: need {need}, have {have}"));
                shortages.push(Shortage { sku: sku.clone(), need, have });
            }
        }
        if !shortages.is_empty() {
            return Decision::Failed { reason: reasons.join("; "), shortages };
        }
        for (sku, need) in demand.lines() {
            if let Some(level) = levels.as_mut().and_then(|levels| levels.get_mut(sku)) {
                level.available -= need;
                level.taken += need;
            }
        }
        Decision::Reserved
    }

    /// What was taken in all, in key order: what the rows must be changed by.
    pub fn into_taken(self) -> Vec<(ShelfKey, i64)> {
        let of_group = |(group_id, levels): (String, BTreeMap<Sku, Level>)| {
            let taken = levels.into_iter().filter(|(_, level)| level.taken > 0);
            taken.map(move |(sku, level)| ((group_id.clone(), sku), level.taken))
        };
        self.0.into_iter().flat_map(of_group).collect()
    }
}

/// How far a reservation has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Stock is held for the order.
    Held,
    /// The order is paid: the hold is for good.
    Committed,
    /// The goods have left the shelf.
    Fulfilled,
    /// The stock is back. Without lines it is a tombstone: the order was cancelled before it got here.
    Released,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Committed => "committed",
            Self::Fulfilled => "fulfilled",
            Self::Released => "released",
        }
    }

    pub fn find(text: &str) -> Option<Self> {
        [Self::Held, Self::Committed, Self::Fulfilled, Self::Released].into_iter().find(|state| state.as_str() == text)
    }
}

/// What an order's life asks of its reservation, in the order that life has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Move {
    /// The order was paid.
    Commit,
    /// It was fulfilled.
    Fulfil,
    /// It was cancelled, or it expired.
    Release,
}

/// What a move comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advance {
    To(State),
    /// It is that far already.
    Already,
    /// The event that leads up to it has not come yet.
    Early {
        awaits: &'static str,
    },
    /// It contradicts what has happened.
    Never,
}

impl Move {
    /// Where it takes a reservation; `None` is an order that has none.
    pub fn from(self, state: Option<State>) -> Advance {
        use State::{Committed, Fulfilled, Held, Released};
        match (self, state) {
            (Self::Commit, None) => Advance::Early { awaits: PLACED },
            (Self::Commit, Some(Held)) => Advance::To(Committed),
            (Self::Commit, Some(Committed | Fulfilled)) => Advance::Already,
            (Self::Fulfil, None | Some(Held)) => Advance::Early { awaits: PAID },
            (Self::Fulfil, Some(Committed)) => Advance::To(Fulfilled),
            (Self::Fulfil, Some(Fulfilled)) => Advance::Already,
            // A cancellation that overtakes its order leaves a tombstone, so that the order reserves nothing.
            (Self::Release, None | Some(Held)) => Advance::To(Released),
            (Self::Release, Some(Released)) => Advance::Already,
            (Self::Commit | Self::Fulfil, Some(Released)) | (Self::Release, Some(Committed | Fulfilled)) => {
                Advance::Never
            }
        }
    }

    /// Does it touch the shelf?
    pub fn moves_stock(self) -> bool {
        self != Self::Commit
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::orders::events::{Price, Quantity};

    fn sku(name: &str) -> Sku {
        Sku::try_from(name.to_owned()).unwrap()
    }

    fn items(lines: &[(&str, i64)]) -> Vec<Item> {
        lines
            .iter()
            .map(|(name, quantity)| Item {
                sku: sku(name),
                quantity: Quantity::try_from(*quantity).unwrap(),
                unit_price_minor: Price::default(),
            })
            .collect()
    }

    fn shelf(stock: &[(&str, i64)]) -> Shelf {
        Shelf::new(stock.iter().map(|(name, available)| (("g".to_owned(), sku(name)), *available)))
    }

    #[test]
    fn a_shortage_names_what_is_needed_and_what_is_there() {
        let decision = shelf(&[("WIDGET-C", 0)]).reserve("g", &Demand::of(&items(&[("WIDGET-C", 1)])));
        let Decision::Failed { reason, shortages } = decision else { panic!("must fail") };
        assert_eq!(reason, "Insufficient WIDGET-C: need 1, have 0");
        assert_eq!(shortages, [Shortage { sku: sku("WIDGET-C"), need: 1, have: 0 }]);
    }

    #[test]
    fn lines_of_one_sku_are_summed_before_they_are_judged() {
        let demand = Demand::of(&items(&[("A", 3), ("A", 3)]));
        assert!(matches!(shelf(&[("A", 5)]).reserve("g", &demand), Decision::Failed { .. }));
        assert_eq!(shelf(&[("A", 6)]).reserve("g", &demand), Decision::Reserved);
    }

    #[test]
    fn an_unknown_sku_and_another_tenants_sku_cannot_be_had() {
        let demand = Demand::of(&items(&[("NOPE", 1)]));
        let Decision::Failed { reason, .. } = shelf(&[]).reserve("g", &demand) else { panic!("must fail") };
        assert_eq!(reason, "Unknown SKU NOPE: need 1, have 0");
        let demand = Demand::of(&items(&[("A", 1)]));
        assert!(matches!(shelf(&[("A", 9)]).reserve("other", &demand), Decision::Failed { .. }));
    }

    const SKUS: [&str; 4] = ["A", "B", "C", "D"];

    fn any_stock() -> impl Strategy<Value = Vec<i64>> {
        prop::collection::vec(0i64..30, SKUS.len())
    }

    fn any_order() -> impl Strategy<Value = Vec<Item>> {
        prop::collection::vec((0..SKUS.len(), 1i64..8), 1..5)
            .prop_map(|lines| items(&lines.iter().map(|(s, q)| (SKUS[*s], *q)).collect::<Vec<_>>()))
    }

    fn stocked(stock: &[i64]) -> Shelf {
        shelf(&SKUS.iter().copied().zip(stock.iter().copied()).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn reservations_never_oversell_and_conserve_stock(
            stock in any_stock(),
            orders in prop::collection::vec(any_order(), 0..30),
        ) {
            let mut shelf = stocked(&stock);
            let mut granted: BTreeMap<Sku, i64> = BTreeMap::new();
            for order in &orders {
                let (demand, before) = (Demand::of(order), shelf.clone());
                match shelf.reserve("g", &demand) {
                    Decision::Reserved => {
                        for (sku, quantity) in demand.lines() {
                            *granted.entry(sku.clone()).or_default() += quantity;
                        }
                    }
                    // All or nothing: a failed order leaves the shelf as it was.
                    Decision::Failed { shortages, .. } => {
                        prop_assert!(!shortages.is_empty());
                        prop_assert_eq!(&before, &shelf);
                    }
                }
            }
            for (name, on_hand) in SKUS.iter().zip(&stock) {
                let left = shelf.0["g"][&sku(name)].available;
                prop_assert!(left >= 0);
                prop_assert_eq!(left + granted.get(&sku(name)).copied().unwrap_or(0), *on_hand);
            }
            let taken: BTreeMap<Sku, i64> = shelf.into_taken().into_iter().map(|((_, sku), n)| (sku, n)).collect();
            prop_assert_eq!(taken, granted);
        }

        #[test]
        fn the_order_of_lines_does_not_matter(stock in any_stock(), order in any_order()) {
            let mut reversed = order.clone();
            reversed.reverse();
            prop_assert_eq!(
                stocked(&stock).reserve("g", &Demand::of(&order)),
                stocked(&stock).reserve("g", &Demand::of(&reversed))
            );
        }

        #[test]
        fn with_ample_stock_totals_do_not_depend_on_the_order_of_arrival(
            orders in prop::collection::vec(any_order(), 0..20),
        ) {
            let ample = [10_000; SKUS.len()];
            let total = |orders: &[Vec<Item>]| {
                let mut shelf = stocked(&ample);
                for order in orders {
                    shelf.reserve("g", &Demand::of(order));
                }
                shelf.into_taken()
            };
            let mut reversed = orders.clone();
            reversed.reverse();
            prop_assert_eq!(total(&orders), total(&reversed));
        }
    }

    /// Applies moves as they come, keeping back what comes early and trying it again after each step.
    fn end_of(mut arrivals: Vec<Option<Move>>) -> Option<State> {
        let (mut state, mut waiting) = (None, Vec::new());
        arrivals.reverse();
        while let Some(arrival) = arrivals.pop() {
            match arrival {
                None => state = state.or(Some(State::Held)), // the order is placed: held, unless there is a row already
                Some(step) => match step.from(state) {
                    Advance::To(next) => state = Some(next),
                    Advance::Already => continue,
                    Advance::Early { .. } => {
                        waiting.push(Some(step));
                        continue;
                    }
                    Advance::Never => panic!("{step:?} from {state:?}"),
                },
            }
            arrivals.append(&mut waiting);
        }
        assert_eq!(waiting, []);
        state
    }

    proptest! {
        #[test]
        fn however_often_and_in_whatever_order_a_life_is_heard_it_ends_the_same(
            (life, end) in prop::sample::select(vec![
                (vec![None], State::Held),
                (vec![None, Some(Move::Commit)], State::Committed),
                (vec![None, Some(Move::Commit), Some(Move::Fulfil)], State::Fulfilled),
                (vec![None, Some(Move::Release)], State::Released),
            ]),
            copies in prop::collection::vec(1usize..4, 3),
            seed in any::<[u8; 32]>(),
        ) {
            let heard: Vec<Option<Move>> =
                life.iter().zip(copies).flat_map(|(event, copies)| std::iter::repeat_n(*event, copies)).collect();
            let mut shuffled: Vec<(u8, Option<Move>)> = seed.iter().copied().zip(heard).collect();
            shuffled.sort_by_key(|(place, _)| *place);
            prop_assert_eq!(end_of(shuffled.into_iter().map(|(_, event)| event).collect()), Some(end));
        }
    }
}
