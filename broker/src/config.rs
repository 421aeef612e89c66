//! Settings: flags over environment over file over defaults.
