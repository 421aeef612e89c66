//! Numbered items whose numbers are never used twice: slot in the low half, generation in the high half.

/// Items by number.
#[derive(Debug)]
pub(super) struct Table<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Table<T> {
    /// Stores an item and numbers it.
    pub(super) fn insert(&mut self, item: T) -> u64 {
        if let Some(slot) = self.free.pop() {
            let (generation, place) = &mut self.slots[slot as usize];
            *place = Some(item);
            return number(slot, *generation);
        }
        let slot =
            u32::try_from(self.slots.len()).expect("requests are bounded far below 2^32 by memory limits");
        self.slots.push((0, Some(item)));
        number(slot, 0)
    }

    fn place(&self, key: u64) -> Option<usize> {
        let slot = key as u32 as usize;
        (self.slots.get(slot)?.0 == (key >> 32) as u32).then_some(slot)
    }

    /// The item with this number.
    pub(super) fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        let slot = self.place(key)?;
        self.slots[slot].1.as_mut()
    }

    /// Takes the item with this number out; the number is dead.
    pub(super) fn remove(&mut self, key: u64) -> Option<T> {
        let slot = self.place(key)?;
        let (generation, place) = &mut self.slots[slot];
        let item = place.take()?;
        *generation = generation.wrapping_add(1);
        self.free.push(slot as u32);
        Some(item)
    }

    /// Number of items.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

fn number(slot: u32, generation: u32) -> u64 {
    u64::from(slot) | u64::from(generation) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_number_finds_nothing() {
        let mut table = Table::default();
        let a = table.insert("a");
        let b = table.insert("b");
        assert_eq!(table.remove(a), Some("a"));
        assert_eq!(table.remove(a), None);
        let c = table.insert("c");
        assert_ne!(a, c);
        assert_eq!(table.get_mut(a), None);
        assert_eq!(table.get_mut(b), Some(&mut "b"));
        assert_eq!(table.get_mut(c), Some(&mut "c"));
        assert_eq!(table.len(), 2);
    }
}
