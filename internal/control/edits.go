// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// Edit is one change of a service or, with a server, of a server. It has exactly one of the last
// four fields.
type Edit struct {
	Service, Server string
	Add             desired.Fields // the fields of a new service or server
	Set             desired.Fields // a merge patch (RFC 7396) of the service or server
	Remove          bool
	Reset           bool // removes the overrides of the service and its servers, or of the server
}

// target names a service, or a server of it.
type target struct{ service, server string }

func (t target) String() string {
	o := desired.Override{Service: t.service, Server: t.server}
	return o.Target()
}

// draft is a list of overrides that is being edited.
type draft[D config.State[D]] struct {
	files *config.Files[D]
	// added has the servers of services that overrides add, with their fields.
	added map[target]map[string]any
	list  []desired.Override
	at    map[target]int   // the index in list of the override of a target
	of    map[string][]int // the indexes in list of the overrides of a service and its servers
	// sets are the targets whose overrides have an edited field Set.
	sets []target
}

// edited returns files with edited overrides, and warnings. It discards the invalid overrides that
// the edits replace, with a warning about each. It leaves out edited fields that change nothing,
// where this is possible. It refuses edits that the next start or reload would not follow.
func edited[D config.State[D]](files *config.Files[D], edits []Edit) (*config.Files[D], fieldpath.Errors, error) {
	if problems := validate(edits); len(problems) > 0 {
		return nil, nil, problems
	}
	files, gone := files.WithoutInvalid(func(o *desired.InvalidOverride) bool { return isEdited(o, edits) })
	d := newDraft(files)
	for _, e := range edits {
		if err := d.edit(e); err != nil {
			return nil, nil, err
		}
	}
	next, warnings, err := files.WithOverrides(d.overrides())
	if err != nil {
		return nil, nil, withoutPlaces(err, edits)
	}
	if trimmed, w, ok := d.trimmed(next); ok {
		next, warnings = trimmed, w
	}
	if len(next.Invalid) > 0 {
		if problems := refuseUnstable(next); len(problems) > 0 {
			return nil, nil, problems
		}
	}
	return next, append(gone, warnings...), nil
}

// withoutPlaces removes the file and the line from errors about edited overrides. These overrides
// come from the edits, and not from the file of overrides.
func withoutPlaces(err error, edits []Edit) error {
	var problems fieldpath.Errors
	if !errors.As(err, &problems) {
		return err
	}
	problems = slices.Clone(problems)
	for i, problem := range problems {
		overridden, _, _ := strings.Cut(problem.Path, ".") // the path begins with the override's target
		changesIt := func(e Edit) bool { return target{e.Service, e.Server}.String() == overridden }
		if slices.ContainsFunc(edits, changesIt) {
			withoutPlace := *problem
			withoutPlace.File, withoutPlace.Line = "", 0
			problems[i] = &withoutPlace
		}
	}
	return problems
}

// isEdited tells whether any edit replaces an invalid override. An edit replaces the override of
// its target. A reset or removal of a service also replaces the overrides of its servers.
func isEdited(o *desired.InvalidOverride, edits []Edit) bool {
	return slices.ContainsFunc(edits, func(e Edit) bool {
		replacesServers := e.Server == "" && (e.Reset || e.Remove)
		return e.Service == o.Service && (e.Server == o.Server || replacesServers)
	})
}

// refuseUnstable returns errors if the next start or reload would lead to another state than next,
// the files after a change. This is possible because a start also reads the overrides that are left
// out now, and some of them may be valid after the change. The errors name the overrides that have
// become valid. If none has, an override that is left out makes another one invalid. Then the
// errors name all overrides that are left out.
func refuseUnstable[D config.State[D]](next *config.Files[D]) (problems fieldpath.Errors) {
	later, _ := next.WithValid(overridesToStore(next))
	if reflect.DeepEqual(later.Desired, next.Desired) {
		return nil
	}
	staysInvalid := map[string]bool{}
	for _, o := range later.Invalid {
		staysInvalid[o.Target()] = true
	}
	causes := slices.DeleteFunc(slices.Clone(next.Invalid), func(o desired.InvalidOverride) bool {
		return staysInvalid[o.Target()]
	})
	if len(causes) == 0 {
		causes = next.Invalid
	}
	for _, o := range causes {
		problems.Addf(o.Target(), "the next start or reload would not follow this change, because of the "+
			"override that is left out (%s): reset it first", o.Does())
	}
	return problems
}

// validate checks the form of edits, without the services and servers to which they apply.
func validate(edits []Edit) (problems fieldpath.Errors) {
	for i, e := range edits {
		at := fieldpath.Item("edits", i)
		actions := 0
		for _, does := range []bool{e.Add != nil, e.Set != nil, e.Remove, e.Reset} {
			if does {
				actions++
			}
		}
		if actions != 1 {
			problems.Addf(at, "must have exactly one of add, set, remove and reset")
			continue
		}
		// An override has no field for a reset. A reset is checked as a removal, which needs the same
		// fields.
		o := desired.Override{
			Service: e.Service, Server: e.Server, Add: e.Add, Set: e.Set, Remove: e.Remove || e.Reset,
		}
		problems = append(problems, o.Validate(at)...)
	}
	return problems
}

// newDraft returns the list of the overrides in files, ready for edits.
func newDraft[D config.State[D]](files *config.Files[D]) *draft[D] {
	d := &draft[D]{
		files: files, added: map[target]map[string]any{},
		list: slices.Clone(files.Overrides), at: map[target]int{}, of: map[string][]int{},
	}
	for i := range d.list {
		o := &d.list[i]
		d.index(target{o.Service, o.Server}, i)
		for t, fields := range d.serversOf(o) {
			d.added[t] = fields
		}
	}
	return d
}

// index notes that the override of a target is the item i of the list.
func (d *draft[D]) index(t target, i int) {
	d.at[t] = i
	d.of[t.service] = append(d.of[t.service], i)
}

// serversOf yields the servers of a service that an override adds, with their fields. If the file
// has a service of this name, the override adds nothing, and serversOf yields nothing.
func (d *draft[D]) serversOf(o *desired.Override) iter.Seq2[target, map[string]any] {
	return func(yield func(target, map[string]any) bool) {
		list, _ := o.Add["servers"].([]any)
		if o.Server != "" || d.files.Has(o.Service, "") {
			return
		}
		for _, item := range list {
			server, ok := item.(map[string]any)
			if ok && !yield(target{o.Service, fmt.Sprint(server["name"])}, server) {
				return
			}
		}
	}
}

// isInBase tells whether a service or server exists without an override of its own: in the file, or
// among the servers of a service that an override adds.
func (d *draft[D]) isInBase(t target) bool {
	return d.files.Has(t.service, t.server) || d.added[t] != nil
}

// override returns the override of a target. If there is none, it appends an empty override to the
// list.
func (d *draft[D]) override(t target) *desired.Override {
	i, ok := d.at[t]
	if !ok {
		i = len(d.list)
		d.index(t, i)
		d.list = append(d.list, desired.Override{Service: t.service, Server: t.server})
	}
	return &d.list[i]
}

// overrides returns all overrides that are not empty.
func (d *draft[D]) overrides() (all []desired.Override) {
	for _, o := range d.list {
		if o.Add != nil || len(o.Set) > 0 || o.Remove {
			all = append(all, o)
		}
	}
	return all
}

// exists tells whether there is a service or server after the edits so far. It must be in the file
// or added by an override, and no override may remove it or its service.
func (d *draft[D]) exists(t target) bool {
	if t.server != "" && !d.exists(target{t.service, ""}) {
		return false
	}
	i, ok := d.at[t]
	if !ok {
		return d.isInBase(t)
	}
	return !d.list[i].Remove && (d.isInBase(t) || d.list[i].Add != nil)
}

// edit makes one edit.
func (d *draft[D]) edit(e Edit) error {
	t := target{e.Service, e.Server}
	switch {
	case e.Add != nil:
		return d.add(t, e.Add)
	case e.Reset:
		d.reset(t)
		return nil
	case !d.exists(t):
		return fmt.Errorf("%s: %w", t, ErrNotFound)
	case e.Remove:
		d.reset(t)
		if d.isInBase(t) { // otherwise only its override had added it, which reset has removed
			d.override(t).Remove = true
		}
		return nil
	}
	o := d.override(t)
	if o.Set == nil {
		o.Set = e.Set
	} else {
		o.Set = mergePatches(d.baseFields(t), o.Set, e.Set)
	}
	o.Line = 0 // the override is no longer that of a line in the file of overrides
	d.sets = append(d.sets, t)
	return nil
}

// add makes the edit that adds a service or server.
func (d *draft[D]) add(t target, fields desired.Fields) error {
	service := target{t.service, ""}
	switch {
	case d.exists(t):
		return fmt.Errorf("%s: %w", t, ErrExists)
	case t.server != "" && !d.exists(service):
		return fmt.Errorf("%s: %w", service, ErrNotFound)
	case d.isInBase(t): // and it does not exist, so an override removes it
		return fmt.Errorf("%s: %w in the configuration file, and is removed by an override: reset it",
			t, ErrExists)
	}
	o := d.override(t)
	*o = desired.Override{Service: t.service, Server: t.server, Add: fields}
	for t, fields := range d.serversOf(o) {
		d.added[t] = fields
	}
	return nil
}

// reset removes the override of a target. For a service, it also removes its servers' overrides.
func (d *draft[D]) reset(t target) {
	if t.server == "" {
		for _, i := range d.of[t.service] {
			d.clear(i)
		}
	} else if i, ok := d.at[t]; ok {
		d.clear(i)
	}
}

// clear makes the override i empty, so that overrides leaves it out.
func (d *draft[D]) clear(i int) {
	o := &d.list[i]
	for t := range d.serversOf(o) {
		delete(d.added, t)
	}
	*o = desired.Override{Service: o.Service, Server: o.Server}
}

// baseFields returns the fields of a target before the patch Set of its override: those of the
// file, or those with which an override adds the target.
func (d *draft[D]) baseFields(t target) map[string]any {
	if i, ok := d.at[t]; ok && d.list[i].Add != nil {
		return d.list[i].Add
	}
	if fields := d.added[t]; fields != nil {
		return fields
	}
	return d.files.Written(t.service, t.server)
}

// mergePatches returns the merge patch (RFC 7396) that has the same effect on fields as the patch
// first and then the patch second. If first removes a section, and second gives the section fields,
// the section must have only these fields. So the result also removes all other fields of the
// section.
func mergePatches(fields, first, second map[string]any) map[string]any {
	merged := maps.Clone(first)
	if merged == nil {
		merged = map[string]any{}
	}
	for name, value := range second {
		if patch, isSection := value.(map[string]any); isSection {
			section, _ := fields[name].(map[string]any)
			before, isPatch := merged[name].(map[string]any)
			_, isInFirst := merged[name]
			if isInFirst && !isPatch { // the patch first removes the section
				before = removal(section)
			}
			value = mergePatches(section, before, patch)
		}
		merged[name] = value
	}
	return merged
}

// removal returns the merge patch that removes all fields.
func removal(fields map[string]any) map[string]any {
	patch := map[string]any{}
	for name := range fields {
		patch[name] = nil
	}
	return patch
}

// trimmed returns next without those edited fields of overrides that change nothing, such as
// drained: false for a server that the file does not drain. ok is false if all edited fields change
// something, or if those that change nothing cannot be left out.
func (d *draft[D]) trimmed(
	next *config.Files[D],
) (trimmed *config.Files[D], warnings fieldpath.Errors, ok bool) {
	withPatches := slices.Clone(d.list)
	for _, t := range d.sets {
		d.override(t).Set = nil
	}
	// without are the files without the edited patches. Often they are d.files, because the overrides
	// without these patches are those of d.files.
	without, others := d.files, d.overrides()
	if !slices.EqualFunc(others, d.files.Overrides, equalOverrides) {
		var err error
		if without, _, err = d.files.WithOverrides(others); err != nil {
			return nil, nil, false // the files are valid only with an edited field
		}
	}
	changed := false
	for _, t := range d.sets {
		set := withPatches[d.at[t]].Set
		kept := effective(set, valueOf(without.Desired, t), valueOf(next.Desired, t))
		changed = changed || !reflect.DeepEqual(map[string]any(set), kept)
		d.override(t).Set = kept
	}
	if !changed {
		return nil, nil, false
	}
	trimmed, warnings, err := d.files.WithOverrides(d.overrides())
	// A field whose own value stays the same can still change the default of another field.
	if err != nil || !reflect.DeepEqual(trimmed.Desired, next.Desired) {
		return nil, nil, false
	}
	return trimmed, warnings, true
}

func equalOverrides(a, b desired.Override) bool { return reflect.DeepEqual(a, b) }

// valueOf returns the service or server of a target. If there is none, the reflect.Value is
// invalid.
func valueOf[D config.State[D]](state D, t target) reflect.Value {
	return reflect.ValueOf(state.Item(t.service, t.server))
}

// effective returns a patch without the fields that have the same value in the structs before and
// after. It keeps each field that one of the structs lacks.
func effective(patch map[string]any, before, after reflect.Value) map[string]any {
	kept := map[string]any{}
	for name, value := range patch {
		was, is := fieldNamed(before, name), fieldNamed(after, name)
		if inner, ok := value.(map[string]any); ok && isStruct(was) && isStruct(is) {
			if inner = effective(inner, was, is); len(inner) > 0 {
				kept[name] = inner
			}
			continue
		}
		if !was.IsValid() || !is.IsValid() || !reflect.DeepEqual(was.Interface(), is.Interface()) {
			kept[name] = value
		}
	}
	return kept
}

func isStruct(v reflect.Value) bool { return v.IsValid() && v.Kind() == reflect.Struct }

// fieldNamed returns the field of a struct by its name in configuration files. If the field is a
// pointer, fieldNamed follows it. The result is invalid if the struct has no such field, or if the
// pointer is nil.
func fieldNamed(in reflect.Value, name string) reflect.Value {
	if !isStruct(in) {
		return reflect.Value{}
	}
	for _, f := range reflect.VisibleFields(in.Type()) {
		if tag, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); tag == name {
			return reflect.Indirect(in.FieldByIndex(f.Index))
		}
	}
	return reflect.Value{}
}
