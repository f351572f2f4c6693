// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"errors"
	"maps"
	"path/filepath"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// reusable is a data path that one test after the other uses. Between two tests all its maps are
// emptied. Most of the time of a test would otherwise be the verifier's work on xdp_lb. Only the
// first process of an instance uses loaded objects again: a process that follows it loads its own.
type reusable struct {
	constants constants
	objects   *dataplane.Objects // nil before the first test has loaded them
	identity  dataplane.Identity // with the hash keys that are constants of the programs
}

// constants are the settings on which the programs and the sizes of the maps depend.
type constants struct {
	limits     desired.Limits
	seed       uint64
	isInternal bool
	shift      uint32
	jiffy      time.Duration
	features   dataplane.Features
}

// narrowed are the instances whose programs have only the features that their services need. All
// others have all features, so that tests of different services use the same programs.
var narrowed sync.Map

var (
	reuse sync.Mutex
	idle  = map[constants][]*reusable{}
	// begun contains the objects of instances whose first process has not started yet, by the
	// kernel's number of their map "identity".
	begun = map[ebpf.MapID]*dataplane.Objects{}
)

func init() {
	needed := dataplane.FeaturesOf
	dataplane.FeaturesOf = func(cfg *desired.Balancer) dataplane.Features {
		if _, is := narrowed.Load(cfg.Node.Instance); is {
			return needed(cfg)
		}
		return dataplane.FeaturesAll
	}
	load := dataplane.LoadObjects
	dataplane.LoadObjects = func(spec *ebpf.CollectionSpec, objects *dataplane.Objects, maps map[string]*ebpf.Map) error {
		loaded, err := takeBegun(maps[identityMap])
		if err != nil {
			return err
		}
		if loaded == nil {
			return load(spec, objects, maps)
		}
		return copyObjects(objects, loaded)
	}
}

const identityMap = "identity"

// reusableFor returns a data path for the configuration, and pins its maps for the instance. When
// the test has ended, and has removed the instance, other tests can use the data path.
func reusableFor(t testing.TB, cfg *desired.Balancer, clock *dataplane.FlowClock) *reusable {
	t.Helper()
	key := constants{cfg.Node.Limits, cfg.Node.Seed, cfg.Node.IsInternal(), clock.Shift, clock.Jiffy, dataplane.FeaturesOf(cfg)}
	reuse.Lock()
	defer reuse.Unlock()
	r := &reusable{constants: key}
	if n := len(idle[key]); n > 0 {
		r, idle[key] = idle[key][n-1], idle[key][:n-1]
		if err := r.begin(cfg.Node.Instance); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { r.end(t) })
	return r
}

// begin pins the maps, as an earlier process of the instance would have left them.
func (r *reusable) begin(instance string) error {
	dir, err := datapath.MakeDir(instance, datapath.RoleBalancer)
	if err != nil {
		return err
	}
	for name, m := range r.objects.Pinned() {
		clone, err := (*m).Clone()
		if err != nil {
			return err
		}
		if err := errors.Join(clone.Pin(filepath.Join(dir, name)), clone.Close()); err != nil {
			return err
		}
	}
	id, err := numberOf(r.objects.Identity)
	begun[id] = r.objects
	return err
}

// takeBegun returns the objects with the given map "identity", once. It returns nil if there are
// none.
func takeBegun(identity *ebpf.Map) (*dataplane.Objects, error) {
	if identity == nil {
		return nil, nil
	}
	id, err := numberOf(identity)
	if err != nil {
		return nil, err
	}
	reuse.Lock()
	defer reuse.Unlock()
	objects := begun[id]
	delete(begun, id)
	return objects, nil
}

func numberOf(m *ebpf.Map) (ebpf.MapID, error) {
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	id, _ := info.ID()
	return id, nil
}

// record keeps the objects that a test has loaded.
func (r *reusable) record(t testing.TB, objects *dataplane.Objects) {
	t.Helper()
	if r.objects != nil {
		return
	}
	kept := new(dataplane.Objects)
	if err := copyObjects(kept, objects); err != nil {
		t.Fatal(err)
	}
	if err := kept.Identity.Lookup(uint32(0), &r.identity); err != nil {
		t.Fatal(err)
	}
	r.objects = kept
}

// end empties the data path for the next test. After a failed test nothing is known about it.
func (r *reusable) end(t testing.TB) {
	if r.objects == nil {
		return
	}
	if t.Failed() {
		_ = r.objects.Close()
		return
	}
	if err := errors.Join(empty(r.objects), r.objects.Identity.Put(uint32(0), r.identity)); err != nil {
		t.Errorf("empty the data path for the next test: %v", err)
		return
	}
	reuse.Lock()
	defer reuse.Unlock()
	idle[r.constants] = append(idle[r.constants], r)
}

// copyObjects makes to refer to the same objects of the kernel.
func copyObjects(to, from *dataplane.Objects) error {
	return eachObject(reflect.ValueOf(to).Elem(), reflect.ValueOf(from).Elem(), func(to, from reflect.Value) (err error) {
		var clone any
		switch object := from.Interface().(type) {
		case *ebpf.Map:
			clone, err = object.Clone()
		case *ebpf.Program:
			clone, err = object.Clone()
		case *ebpf.Variable:
			clone = object
		}
		to.Set(reflect.ValueOf(clone))
		return err
	})
}

// eachObject calls f for each map, program and variable of two structs of the same type.
func eachObject(a, b reflect.Value, f func(a, b reflect.Value) error) error {
	var errs []error
	for i := range a.NumField() {
		if a.Field(i).Kind() == reflect.Struct {
			errs = append(errs, eachObject(a.Field(i), b.Field(i), f))
		} else {
			errs = append(errs, f(a.Field(i), b.Field(i)))
		}
	}
	return errors.Join(errs...)
}

// empty makes all maps and variables as they are after a load.
func empty(objects *dataplane.Objects) error {
	v := reflect.ValueOf(objects).Elem()
	return eachObject(v, v, func(_, field reflect.Value) error {
		switch object := field.Interface().(type) {
		case *ebpf.Map:
			return emptyMap(object)
		case *ebpf.Variable:
			if !object.ReadOnly() {
				return object.Set(make([]byte, object.Size()))
			}
		}
		return nil
	})
}

func emptyMap(m *ebpf.Map) error {
	switch m.Type() {
	case ebpf.Array, ebpf.PerCPUArray:
		return zero(m)
	case ebpf.ArrayOfMaps:
		return deleteInner(m)
	case ebpf.RingBuf:
		return readAll(m)
	}
	for {
		key, err := m.NextKeyBytes(nil)
		if err != nil || key == nil {
			return err
		}
		if err := m.Delete(key); err != nil {
			return err
		}
	}
}

// readAll reads what is in a ring buffer.
func readAll(m *ebpf.Map) error {
	r, err := ringbuf.NewReader(m)
	if err != nil {
		return err
	}
	defer r.Close()
	var record ringbuf.Record
	for r.AvailableBytes() > 0 {
		if err := r.ReadInto(&record); err != nil {
			return err
		}
	}
	return nil
}

// zero writes zeros to all elements of an array.
func zero(m *ebpf.Map) error {
	keys := make([]uint32, m.MaxEntries())
	for i := range keys {
		keys[i] = uint32(i)
	}
	n := len(keys)
	if m.Type() == ebpf.PerCPUArray {
		cpus, err := ebpf.PossibleCPU()
		if err != nil {
			return err
		}
		n *= cpus
	}
	element := reflect.ArrayOf(int(m.ValueSize()), reflect.TypeFor[byte]())
	_, err := m.BatchUpdate(keys, reflect.MakeSlice(reflect.SliceOf(element), n, n).Interface(), nil)
	return err
}

// deleteInner removes the maps from a map of maps.
func deleteInner(m *ebpf.Map) error {
	keys, ids := make([]uint32, m.MaxEntries()), make([]uint32, m.MaxEntries())
	n, err := m.BatchLookup(new(ebpf.MapBatchCursor), keys, ids, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	for _, key := range keys[:n] {
		if err := m.Delete(key); err != nil {
			return err
		}
	}
	return nil
}

// A test that uses a data path again finds its maps as a load makes them.
func TestReusedDataPathIsEmpty(t *testing.T) {
	t.Parallel()
	cfg := standard()
	cfg.Node.Seed = 77 // no other test uses this data path
	var r *reusable
	var identity dataplane.Identity
	t.Run("first test", func(t *testing.T) {
		f := openWith(t, cfg, stoppedClock(t), false)
		identity = f.identity
		f.run(frameOf(web))
		f.must(f.plane.Objects.Identity.Put(uint32(0), dataplane.Identity{Version: identity.Version}))
		f.setAnswered(1)
		f.must(f.sweep())
		used := usedMaps(t, &f.plane.Objects)
		if len(used) < 8 {
			t.Errorf("the test uses only the maps %v", used)
		}
	})
	for key, all := range idleNow() {
		if key.seed == cfg.Node.Seed {
			r = all[0]
		}
	}
	if r == nil {
		t.Fatal("the data path of the first test cannot be used again")
	}
	if used := usedMaps(t, r.objects); len(used) > 0 {
		t.Errorf("maps still have content: %v", used)
	}
	t.Run("second test", func(t *testing.T) {
		f := openWith(t, cfg, stoppedClock(t), false)
		if got, want := programNumber(t, f.plane.Objects.XdpLb), programNumber(t, r.objects.XdpLb); got != want {
			t.Errorf("the test runs program %d instead of %d", got, want)
		}
		if f.identity != identity {
			t.Errorf("the identity is %+v, and %+v in the programs", f.identity, identity)
		}
		f.stop()
		f.start(cfg)
		if got, other := programNumber(t, f.plane.Objects.XdpLb), programNumber(t, r.objects.XdpLb); got == other {
			t.Errorf("the second process has not loaded its own program")
		}
	})
}

// Content that a load gives to a map would get lost when the map is emptied.
func TestLoadsBeginEmpty(t *testing.T) {
	t.Parallel()
	objects := new(dataplane.Objects)
	spec, _, err := dataplane.LoadSpec()
	if err != nil {
		t.Fatal(err)
	}
	if err := spec.LoadAndAssign(objects, nil); err != nil {
		t.Fatal(err)
	}
	defer objects.Close()
	if used := usedMaps(t, objects); len(used) > 0 {
		t.Errorf("maps have content: %v", used)
	}
}

func idleNow() map[constants][]*reusable {
	reuse.Lock()
	defer reuse.Unlock()
	return maps.Clone(idle)
}

func programNumber(t *testing.T, program *ebpf.Program) ebpf.ProgramID {
	t.Helper()
	info, err := program.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return id
}

// usedMaps returns the maps and variables that have content, except the identity.
func usedMaps(t *testing.T, objects *dataplane.Objects) (used []string) {
	t.Helper()
	v := reflect.ValueOf(objects).Elem()
	err := eachObject(v, v, func(_, field reflect.Value) error {
		switch object := field.Interface().(type) {
		case *ebpf.Map:
			has, err := hasContent(object)
			if has && object != objects.Identity {
				used = append(used, object.String())
			}
			return err
		case *ebpf.Variable:
			content := make([]byte, object.Size())
			if err := object.Get(content); err != nil {
				return err
			}
			if !object.ReadOnly() && !isZero(content) {
				used = append(used, object.String())
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return used
}

// hasContent tells whether a map has an element other than zeros.
func hasContent(m *ebpf.Map) (bool, error) {
	if m.Type() == ebpf.RingBuf {
		r, err := ringbuf.NewReader(m)
		if err != nil {
			return false, err
		}
		defer r.Close()
		return r.AvailableBytes() > 0, nil
	}
	isArray := m.Type() == ebpf.Array || m.Type() == ebpf.PerCPUArray
	var key, value []byte
	var perCPU [][]byte
	elements := m.Iterate()
	if m.Type() == ebpf.PerCPUArray {
		for elements.Next(&key, &perCPU) {
			if !isZero(bytes.Join(perCPU, nil)) {
				return true, nil
			}
		}
		return false, elements.Err()
	}
	for elements.Next(&key, &value) {
		if !isArray || !isZero(value) {
			return true, nil
		}
	}
	return false, elements.Err()
}

func isZero(content []byte) bool { return len(bytes.Trim(content, "\x00")) == 0 }
