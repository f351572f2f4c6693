// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// An item is what the store has at a key: the versions of the key's value that balancers may still
// need, the newest first.
//
// A change can have more keys than a transaction of etcd. So a writer first writes the versions,
// each with the number of the change, in any number of transactions. Last, it writes this number
// into the key head. Nobody reads versions with a number above that of the head. So every reader
// sees a change wholly or not at all.
type item []version

// version is the value of a key from a change on.
type version struct {
	Change uint64 `json:"change"`
	// Value is absent if the key has no value from this change on.
	Value json.RawMessage `json:"value,omitempty"`
}

// parseItem reads an item. The changes of its versions must be in descending order.
func parseItem(text []byte) (item, error) {
	var it item
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&it); err != nil {
		return nil, err
	}
	if len(it) == 0 {
		return nil, errors.New("has no version")
	}
	for i, v := range it {
		if i > 0 && v.Change >= it[i-1].Change {
			return nil, fmt.Errorf("version of change %d: not in order", v.Change)
		}
	}
	return it, nil
}

// at returns the value of the key as of a change, or nil if there is none.
func (it item) at(change uint64) json.RawMessage {
	if v := it.versionAt(change); v != nil {
		return v.Value
	}
	return nil
}

// versionAt returns the version that holds as of a change, or nil if there is none.
func (it item) versionAt(change uint64) *version {
	for i := range it {
		if it[i].Change <= change {
			return &it[i]
		}
	}
	return nil
}

// with returns the item with the version of a new change. Readers may still read the store as of
// the changes in inUse. The item keeps the versions that hold as of these changes, and no others.
func (it item) with(v version, inUse ...uint64) item {
	next := item{v}
	// From the last change to the first, because an item has its newest version first.
	for _, change := range slices.Backward(slices.Sorted(slices.Values(inUse))) {
		// The same version may hold as of several of these changes.
		if kept := it.versionAt(change); kept != nil && kept.Change < next[len(next)-1].Change {
			next = append(next, *kept)
		}
	}
	return next.trimmed()
}

// without returns the item without the versions of changes after the given one. The result can be
// empty.
func (it item) without(after uint64) item {
	return slices.DeleteFunc(slices.Clone(it), func(v version) bool { return v.Change > after })
}

// trimmed drops versions without a value from the end. Where an item has no version, the key has no
// value either.
func (it item) trimmed() item {
	for len(it) > 1 && it[len(it)-1].Value == nil {
		it = it[:len(it)-1]
	}
	return it
}

// isGone tells whether the key has no value as of a change and all later ones.
func (it item) isGone(change uint64) bool {
	return len(it) > 0 && it[0].Change <= change && it[0].Value == nil
}

// text returns the item as the store has it.
func (it item) text() string {
	text, err := json.Marshal(it)
	if err != nil {
		panic(err) // the values were read from JSON
	}
	return string(text)
}

// Tree is the content of a fleet's store as of a change: the JSON values of services, servers and
// overrides. The keys are those of the store without the prefix.
type Tree map[string]json.RawMessage

// changed is a key that differs between two trees.
type changed struct {
	key   string
	value json.RawMessage // nil: the key is removed
}

// changesTo returns the keys that differ in another tree, with their values there: first the keys
// of the other tree, and then the removed ones.
func (t Tree) changesTo(next Tree) []changed {
	var all []changed
	for _, key := range slices.Sorted(maps.Keys(next)) {
		if before, ok := t[key]; !ok || !bytes.Equal(before, next[key]) {
			all = append(all, changed{key, next[key]})
		}
	}
	for _, key := range slices.Sorted(maps.Keys(t)) {
		if _, ok := next[key]; !ok {
			all = append(all, changed{key, nil})
		}
	}
	return all
}

// Equal tells whether two trees have the same keys and values.
func (t Tree) Equal(other Tree) bool { return len(t.changesTo(other)) == 0 }
