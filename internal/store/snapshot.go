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

// Snapshot is the content of the store at one revision of etcd. It never changes.
type Snapshot struct {
	prefix   string // of all keys
	cluster  uint64 // of etcd
	revision int64
	head     *head // nil: the store has no services
	release  *release
	// headAt and releaseAt are the revisions at which the keys were written. 0: they do not exist.
	headAt, releaseAt int64
	hasWriter         bool // a process writes a change of many keys
	// leader is the name of the balancer that makes generations, and what identifies its lease.
	// Empty: none.
	leader   string
	items    map[string]item
	pieces   map[string]string // of sets, by key below the prefix
	problems map[string]error  // keys whose values are not valid
}

func newSnapshot(prefix string) *Snapshot {
	return &Snapshot{
		prefix: prefix,
		items:  map[string]item{}, pieces: map[string]string{}, problems: map[string]error{},
	}
}

// clone returns a copy that does not follow the original.
func (n *Snapshot) clone() *Snapshot {
	c := *n
	c.items, c.pieces, c.problems = maps.Clone(n.items), maps.Clone(n.pieces), maps.Clone(n.problems)
	return &c
}

// put notes the value of a key.
func (n *Snapshot) put(key string, kv *mvccpb.KeyValue) {
	delete(n.problems, key)
	err := n.read(key, kv)
	if err != nil {
		n.remove(key)
		n.problems[key] = err
	}
}

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
	case treeOf(key) != "":
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

// Check returns an error if the store has no services, or if a key has a value that is not valid.
// It does not look at generations, which the leader can repair.
func (n *Snapshot) Check() error {
	return n.check(func(key string) bool { return treeOf(key) != generationsKey })
}

// checkForReplacing is Check before a change that replaces all content, and so also values that are
// not valid.
func (n *Snapshot) checkForReplacing() error {
	return n.check(func(key string) bool { return treeOf(key) == "" })
}

func (n *Snapshot) check(isWanted func(key string) bool) error {
	for _, key := range slices.Sorted(maps.Keys(n.problems)) {
		if !isWanted(key) {
			continue
		}
		cure := ""
		if treeOf(key) != "" {
			cure = ": correct that by segue store import --replace"
		}
		return fmt.Errorf("key %s%s: %w%s", n.prefix, key, n.problems[key], cure)
	}
	if n.head == nil || n.head.Change == 0 { // 0: the first change is being written
		return ErrEmpty
	}
	return nil
}

// unreadable returns the removal of the keys of content whose values are not valid, and which another
// content does not have.
func (n *Snapshot) unreadable(after Tree) (all []changed) {
	for _, key := range slices.Sorted(maps.Keys(n.problems)) {
		if isContent := treeOf(key) != "" && treeOf(key) != generationsKey; isContent && after[key] == nil {
			all = append(all, changed{key, nil})
		}
	}
	return all
}

// counted is the content as of a change, in which services and servers whose values are not valid
// occur without fields.
func (n *Snapshot) counted(change uint64) Tree {
	t := n.tree(change)
	for key := range n.problems {
		if tree := treeOf(key); tree == servicesKey || tree == serversKey {
			t[key] = json.RawMessage("{}")
		}
	}
	return t
}

// Version returns the version of the last change. Check has returned no error.
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
		if value := it.at(change); value != nil && treeOf(key) != generationsKey {
			t[key] = value
		}
	}
	return t
}

// Tree returns the content of the fleet as of the last change. Check has returned no error.
func (n *Snapshot) Tree() Tree { return n.tree(n.head.Change) }

// record is the generation of a service, as the store has it. The sets have keys of their own,
// since one with many servers is large and generations have most sets in common.
type record struct {
	Number uint64   `json:"number"`
	Sets   []setRef `json:"sets"`
}

// setRef names a set of servers.
type setRef struct {
	ID     string `json:"id"`     // of its text
	Pieces int    `json:"pieces"` // of its text
}

func (r setRef) key(piece int) string { return fmt.Sprintf("%s%s/%d", setsKey, r.ID, piece) }

// generations returns the generations of all services as of a released change. The error names the
// first key that cannot be read, or is missing; the result then has the others.
func (n *Snapshot) generations(change uint64) (serversets.Generations, error) {
	all := serversets.Generations{}
	damaged := map[string]error{}
	for key, problem := range n.problems {
		if treeOf(key) == generationsKey {
			damaged[key] = problem
		}
	}
	for key, it := range n.items {
		value := it.at(change)
		if value == nil || treeOf(key) != generationsKey {
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

// services yields the names of the services as of a change. A name may occur twice.
func (n *Snapshot) services(change uint64) iter.Seq[string] {
	return func(yield func(string) bool) {
		for key, it := range n.items {
			tree := treeOf(key)
			if tree != servicesKey && tree != overridesKey || it.at(change) == nil {
				continue
			}
			service, server, err := namesOf(tree, key)
			if err != nil || server != "" {
				continue
			}
			o, err := n.override(service, change)
			isThere := tree == servicesKey || o.Add != nil
			if err == nil && isThere && !o.Remove && !yield(service) {
				return
			}
		}
	}
}

// override returns the override of a service as of a change, which is empty if there is none.
func (n *Snapshot) override(service string, change uint64) (desired.Override, error) {
	key := overrideKey(service, "")
	return Tree{key: n.items[key].at(change)}.override(key)
}

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
			from = string(kv.Key) + "\x00"
		}
		if !page.More {
			return n, nil
		}
	}
}

// forRequest returns the context of a request. A member of etcd that is cut off from the others
// refuses the request at once. Otherwise it would try to answer for seconds.
func forRequest(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(clientv3.WithRequireLeader(ctx), timeout)
}

// untilLeader repeats a request until it reaches a member of etcd that is not cut off from the
// others. The library takes the members in turn. It repeats only Get by itself.
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

// commit runs a transaction. ok tells whether its conditions held. The error wraps errUncertain if
// the transaction may have taken place, or may yet. It also wraps errFull if it cannot any more.
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

// uncertain is an error that wraps errUncertain. Its text is only the cause.
type uncertain struct{ cause error }

func (u uncertain) Error() string { return u.cause.Error() }

func (u uncertain) Unwrap() []error { return []error{errUncertain, u.cause} }

// isRefusal tells whether the store has refused a request, so that it has had no effect.
func isRefusal(err error) bool {
	switch {
	case errors.Is(err, rpctypes.ErrNoLeader):
		return true
	case errors.Is(err, rpctypes.ErrNoSpace):
		return false
	}
	code := status.Code(err) // of the library's own refusals
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
