// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	mvccpb "go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
)

// Snapshot is the content of the store at one revision of etcd. The watch applies events to a
// snapshot of its own, and passes on copies, which stay as they are.
type Snapshot struct {
	prefix   string // of all keys in the store
	cluster  uint64 // the ID of the cluster of etcd
	revision int64
	head     *head    // nil: the store has no services
	release  *release // nil: nothing is released
	// headAt and releaseAt are the revisions at which the keys were written. 0: they do not exist.
	headAt, releaseAt int64
	hasWriter         bool // a process writes a change of many keys
	// leader is the value of the key leader: the name of the balancer that makes generations, a space
	// and an ID of its lease. Empty: there is no leader.
	leader string
	// The keys of these maps have no prefix.
	items    map[string]item
	pieces   map[string]string // of sets
	problems map[string]error  // the keys whose values are not valid, with the reasons
}

func newSnapshot(prefix string) *Snapshot {
	return &Snapshot{
		prefix: prefix,
		items:  map[string]item{}, pieces: map[string]string{}, problems: map[string]error{},
	}
}

// clone returns a copy that stays the same when the original changes.
func (n *Snapshot) clone() *Snapshot {
	c := *n
	c.items, c.pieces, c.problems = maps.Clone(n.items), maps.Clone(n.pieces), maps.Clone(n.problems)
	return &c
}

// put notes the value of a key. If the value is not valid, put notes the reason in problems
// instead.
func (n *Snapshot) put(key string, kv *mvccpb.KeyValue) {
	delete(n.problems, key)
	err := n.read(key, kv)
	if err != nil {
		n.remove(key)
		n.problems[key] = err
	}
}

// read notes the value of a key, or returns an error if the value is not valid. It does not check
// the pieces of sets, and ignores unknown keys.
func (n *Snapshot) read(key string, kv *mvccpb.KeyValue) error {
	switch {
	case key == headKey:
		n.head, n.headAt = &head{}, kv.ModRevision
		if err := json.Unmarshal(kv.Value, n.head); err != nil {
			return err
		}
		if n.head.Format != format {
			return fmt.Errorf("format %d is not %d, the format of this build", n.head.Format, format)
		}
	case key == releaseKey:
		n.release, n.releaseAt = &release{}, kv.ModRevision
		return json.Unmarshal(kv.Value, n.release)
	case key == writerKey:
		n.hasWriter = true
	case key == leaderKey:
		n.leader = string(kv.Value)
	case strings.HasPrefix(key, setsKey):
		n.pieces[key] = string(kv.Value)
	case kindOf(key) != "":
		it, err := parseItem(kv.Value)
		if err != nil {
			return err
		}
		n.items[key] = it
	}
	return nil
}

// remove notes that a key has no value.
func (n *Snapshot) remove(key string) {
	delete(n.problems, key)
	switch key {
	case headKey:
		n.head, n.headAt = nil, 0
	case releaseKey:
		n.release, n.releaseAt = nil, 0
	case writerKey:
		n.hasWriter = false
	case leaderKey:
		n.leader = ""
	default:
		delete(n.pieces, key)
		delete(n.items, key)
	}
}

// Check returns an error if the store has no services, or if the value of a key is not valid. It
// ignores generations, because the leader can repair them.
func (n *Snapshot) Check() error {
	return n.check(func(key string) bool { return kindOf(key) != generationsKey })
}

// checkForReplacing is Check before a change that replaces all content. It also ignores values of
// services, servers and overrides, because the change replaces them.
func (n *Snapshot) checkForReplacing() error {
	return n.check(func(key string) bool { return kindOf(key) == "" })
}

// check does the work of Check for the keys for which considers returns true.
func (n *Snapshot) check(considers func(key string) bool) error {
	for _, key := range slices.Sorted(maps.Keys(n.problems)) {
		if !considers(key) {
			continue
		}
		cure := ""
		if kindOf(key) != "" {
			cure = ": correct that by segue store import --replace"
		}
		return fmt.Errorf("key %s%s: %w%s", n.prefix, key, n.problems[key], cure)
	}
	if n.head == nil || n.head.Change == 0 { // 0: the first change is being written
		return ErrEmpty
	}
	return nil
}

// unreadableRemovals returns the unreadable keys that the content after lacks, as removals. A key of
// a service, server or override is unreadable if its value is not valid. Tree leaves out such keys,
// so changesTo does not find their removal.
func (n *Snapshot) unreadableRemovals(after Tree) (all []changed) {
	for _, key := range slices.Sorted(maps.Keys(n.problems)) {
		kind := kindOf(key)
		isContent := kind != "" && kind != generationsKey
		if isContent && after[key] == nil {
			all = append(all, changed{key, nil})
		}
	}
	return all
}

// counted returns the content as of a change, for counting servers. A service or server whose value
// is not valid occurs in it without fields.
func (n *Snapshot) counted(change uint64) Tree {
	t := n.tree(change)
	for key := range n.problems {
		if kind := kindOf(key); kind == servicesKey || kind == serversKey {
			t[key] = json.RawMessage("{}")
		}
	}
	return t
}

// Version returns the version of the last change. The snapshot must have a head.
func (n *Snapshot) Version() Version { return Version{n.head.Epoch, n.head.Change} }

// released returns the version that balancers follow, or false if none is released yet.
func (n *Snapshot) released() (Version, bool) {
	if n.release == nil || n.head == nil || n.release.Epoch != n.head.Epoch {
		return Version{}, false
	}
	return Version{n.release.Epoch, n.release.Change}, true
}

// tree returns the content of the fleet as of a change.
func (n *Snapshot) tree(change uint64) Tree {
	t := make(Tree, len(n.items))
	for key, it := range n.items {
		if value := it.at(change); value != nil && kindOf(key) != generationsKey {
			t[key] = value
		}
	}
	return t
}

// Tree returns the content of the fleet as of the last change. The snapshot must have a head.
func (n *Snapshot) Tree() Tree { return n.tree(n.head.Change) }

// record is the generation of a service in the store. The sets of servers have keys of their own: a
// set with many servers is large, and successive generations have most sets in common.
type record struct {
	Number uint64   `json:"number"`
	Sets   []setRef `json:"sets"`
}

// setRef names a set of servers. The text of the set is its JSON. It is stored in pieces.
type setRef struct {
	ID     string `json:"id"`     // idOf the text
	Pieces int    `json:"pieces"` // the number of pieces
}

func (r setRef) key(piece int) string { return fmt.Sprintf("%s%s/%d", setsKey, r.ID, piece) }

// generations returns the generations of all services as of a released change. If some records
// cannot be read, or are missing, the error names the first of their keys, and the result has the
// other records.
func (n *Snapshot) generations(change uint64) (serversets.Generations, error) {
	all := serversets.Generations{}
	damaged := map[string]error{}
	for key, problem := range n.problems {
		if kindOf(key) == generationsKey {
			damaged[key] = problem
		}
	}
	for key, it := range n.items {
		value := it.at(change)
		if value == nil || kindOf(key) != generationsKey {
			continue
		}
		service, _, err := namesOf(generationsKey, key)
		var g serversets.Generation
		if err == nil {
			g, err = n.generation(value)
		}
		if err != nil {
			damaged[key] = err
			continue
		}
		all[service] = g
	}
	for service := range n.services(change) {
		record := keyOf(generationsKey, service)
		if _, ok := all[service]; !ok && damaged[record] == nil {
			damaged[record] = errors.New("missing")
		}
	}
	for _, key := range slices.Sorted(maps.Keys(damaged)) {
		return all, fmt.Errorf("key %s%s: %w", n.prefix, key, damaged[key])
	}
	return all, nil
}

// services yields the names of the services as of a change: those with a key of their own, and
// those that an override adds. It leaves out services whose override removes them or cannot be
// read. A name may occur twice.
func (n *Snapshot) services(change uint64) iter.Seq[string] {
	return func(yield func(string) bool) {
		for key, it := range n.items {
			kind := kindOf(key)
			mayAddService := kind == servicesKey || kind == overridesKey
			if !mayAddService || it.at(change) == nil {
				continue
			}
			service, server, err := namesOf(kind, key)
			if err != nil || server != "" {
				continue
			}
			o, err := n.override(service, change)
			isThere := err == nil && !o.Remove && (kind == servicesKey || o.Add != nil)
			if isThere && !yield(service) {
				return
			}
		}
	}
}

// override returns a service's override as it was after a change. The result is empty if the
// service had no override then.
func (n *Snapshot) override(service string, change uint64) (desired.Override, error) {
	key := overrideKey(service, "")
	return Tree{key: n.items[key].at(change)}.override(key)
}

// generation returns the generation of a record. It puts the sets together from their pieces.
func (n *Snapshot) generation(value json.RawMessage) (g serversets.Generation, err error) {
	var r record
	if err := json.Unmarshal(value, &r); err != nil {
		return g, err
	}
	g = serversets.Generation{Number: r.Number, Sets: make([]serversets.Set, len(r.Sets))}
	for i, ref := range r.Sets {
		var text strings.Builder
		for piece := range ref.Pieces {
			text.WriteString(n.pieces[ref.key(piece)])
		}
		if idOf(text.String()) != ref.ID {
			return g, fmt.Errorf("the set %s is not complete", ref.ID)
		}
		if err := json.Unmarshal([]byte(text.String()), &g.Sets[i]); err != nil {
			return g, fmt.Errorf("the set %s: %w", ref.ID, err)
		}
	}
	return g, g.Validate()
}

// Read reads the whole content at one revision.
func (s *Store) Read(ctx context.Context) (*Snapshot, error) {
	n := newSnapshot(s.prefix)
	from, end := s.prefix, clientv3.GetPrefixRangeEnd(s.prefix)
	options := []clientv3.OpOption{
		clientv3.WithRange(end), clientv3.WithLimit(pageSize),
		clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend),
	}
	for {
		page, err := s.get(ctx, from, options...)
		if err != nil {
			return nil, err
		}
		if n.revision == 0 {
			n.cluster, n.revision = page.Header.ClusterId, page.Header.Revision
			options = append(options, clientv3.WithRev(n.revision))
		}
		for _, kv := range page.Kvs {
			n.put(strings.TrimPrefix(string(kv.Key), s.prefix), kv)
			from = string(kv.Key) + "\x00" // the next possible key
		}
		if !page.More {
			return n, nil
		}
	}
}

// forRequest returns the context of a request. With it, a member of etcd that is cut off from the
// others refuses the request at once. Without it, the member would try for seconds to answer.
func forRequest(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(clientv3.WithRequireLeader(ctx), timeout)
}

// untilLeader repeats a request as long as a member of etcd refuses it because the member is cut
// off from the others. The library sends each attempt to the next member. Of the requests, the
// library itself repeats only Get.
func untilLeader[T any](ctx context.Context, request func() (T, error)) (answer T, err error) {
	for {
		answer, err = request()
		if !errors.Is(err, rpctypes.ErrNoLeader) {
			return answer, err
		}
		select {
		case <-ctx.Done():
			return answer, err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// get reads a key, or the range of keys that the options select.
func (s *Store) get(
	ctx context.Context, key string, options ...clientv3.OpOption,
) (*clientv3.GetResponse, error) {
	began := time.Now()
	ctx, cancel := forRequest(ctx, requestTimeout)
	defer cancel()
	response, err := s.client.Get(ctx, key, options...)
	if err != nil {
		return nil, s.causes.describe(err, began)
	}
	return response, nil
}

// commit runs a transaction. ok tells whether its conditions held. If the transaction may have
// taken place, or may still do so, the error wraps errUncertain. If the error also wraps errFull,
// the transaction has ended: it cannot take place later.
func (s *Store) commit(ctx context.Context, conditions []clientv3.Cmp, operations []clientv3.Op) (
	revision int64, ok bool, err error,
) {
	began := time.Now()
	ctx, cancel := forRequest(ctx, requestTimeout)
	defer cancel()
	response, err := untilLeader(ctx, s.client.Txn(ctx).If(conditions...).Then(operations...).Commit)
	switch {
	case isRefusal(err):
		return 0, false, s.causes.describe(err, began)
	case err != nil:
		return 0, false, uncertain{s.causes.describe(err, began)}
	}
	return response.Header.Revision, response.Succeeded, nil
}

// errConflict tells that somebody else has changed the store meanwhile.
var errConflict = errors.New("another writer has changed the store meanwhile")

// errUncertain tells that a transaction may have taken place although there was no answer.
var errUncertain = errors.New("the transaction may have taken place")

// uncertain is an error that wraps errUncertain and a cause. Its text is that of the cause.
type uncertain struct{ cause error }

func (u uncertain) Error() string { return u.cause.Error() }

func (u uncertain) Unwrap() []error { return []error{errUncertain, u.cause} }

// isRefusal tells whether the store has refused a request, so that it has had no effect.
func isRefusal(err error) bool {
	switch {
	case errors.Is(err, rpctypes.ErrNoLeader):
		return true
	case errors.Is(err, rpctypes.ErrNoSpace): // it may have had its effect: see errFull
		return false
	}
	code := status.Code(err) // of a refusal by the library itself
	if refusal, ok := errors.AsType[rpctypes.EtcdError](err); ok {
		code = refusal.Code()
	}
	switch code {
	case codes.InvalidArgument, codes.NotFound, codes.PermissionDenied, codes.ResourceExhausted,
		codes.FailedPrecondition, codes.OutOfRange, codes.Unimplemented, codes.Unauthenticated:
		return true
	}
	return false
}
