"""A lowered operator as a function of the host that makes its launches: the kernels that were chosen for one case."""

from __future__ import annotations

from dispatcher.backends.cuda.convolution import HaloTables
from dispatcher.backends.cuda.exporttext import Sections, array, assignments, field, parameters_type
from dispatcher.backends.cuda.program import BLOCK, C_TYPES, Launch, PackedWeight, Program, Reference
from dispatcher.backends.cuda.toolkit import Kernel
from dispatcher.ops.symbols import c_text


class CaseText:
    """The function of one program.

    Args:
        name: of the function.
        program: what it runs.
        sections: where its kernels go.
    """

    def __init__(self, name: str, program: Program, sections: Sections) -> None:
        self.name, self.program, self.sections = name, program, sections
        self.lines: list[str] = []
        self._written: set[Reference] = set()

    def text(self) -> str:
        """The function; its kernels are in the sections then."""
        program = self.program
        for value in program.values:
            kind = C_TYPES[program.value_dtype(value)]
            elements = program.value_bytes(value) // (8 if kind == "double" else 4)
            self.lines.append(f"{kind} *value_{value} = call.take<{kind}>({elements});")
        for number, size in enumerate(program.scratch_bytes):
            self.lines.append(f"char *scratch_{number} = call.take<char>({size});")
        for number, packed in enumerate(program.packed):
            self._pack(number, packed)
        for launch, planned in zip(program.launches, program.planned, strict=True):
            self.lines.append(f"// {', '.join(planned.steps)}: {planned.algorithm}")
            self._launch(launch)
        body = "".join(f"  {line}\n" for line in self.lines)
        return f"static void {self.name}(const Arguments &a, Call &call) {{\n{body}}}\n" + (
            f"static bool is_{self.name}(const Arguments &a) {{\n  return {self._condition()};\n}}\n"
        )

    def _condition(self) -> str:
        """Whether the arguments are this case's, on a device that has what its kernels need."""
        operator, launches = self.program.operator, self.program.launches
        numbers = {**operator.sizes, **operator.scalars}
        equal = [f"{field(name)} == {c_text(number)}" for name, number in numbers.items()]
        pointers = [*operator.tensor_shapes, operator.problem.output.name]
        suited = [f"aligned({field(name)})" for name in pointers]
        architecture = 80 if any(launch.name == "conv_halo" for launch in launches) else 0
        shared = max(launch.shared_bytes for launch in launches)
        return " && ".join([*equal, *suited, f"fits({architecture}, {shared})"])

    def _address(self, reference: Reference) -> str:
        match reference.kind:
            case "tensor":
                return field(str(reference.key))
            case "value" if reference.key == len(self.program.operator.steps):
                return field(self.program.operator.problem.output.name)
        return f"{reference.kind}_{reference.key}"

    def _launch(self, launch: Launch) -> None:
        space = self.sections.name(launch.kernel, launch.name)
        self._tables(launch, space)
        self.lines += ["{", f"  {space}::{parameters_type(launch.kernel, launch.name)} p = {{}};"]
        self.lines += [f"  {line}" for line in assignments("p", launch.parameters[()])]
        for path, reference in launch.pointers:
            place = "p" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
            self.lines.append(f"  point({place}, {self._address(reference)});")
        sizes = f"{launch.blocks}, {launch.threads}, {launch.shared_bytes}"
        self.lines += [f"  call.launch({space}::{launch.name}, {sizes}, p);", "}"]

    # ---- tables and weights, which are made on the device --------------------------------------------------------
    def _tables(self, launch: Launch, space: str) -> None:
        """Have the tables of a convolution written that are not yet."""
        tables = {path[0]: reference for path, reference in launch.pointers if reference.kind == "table"}
        new = [reference for reference in tables.values() if reference not in self._written]
        if not new:
            return
        self._written.update(new)
        packed = next(reference for path, reference in launch.pointers if path == ("w",))
        known = self.program.packed[int(packed.key)]
        kinds = {"passes": "Pass", "taps": "Tap", "phases": "Phase", "slots": "int", "terms": "Term"}
        name = f"tables_{self.name}_{packed.key}"
        parameters, arguments, body = [], [], ""
        for table, reference in tables.items():
            kind, rows = kinds[str(table)], self.program.tables[int(reference.key)]
            scope = "" if kind == "int" else f"{space}::"
            self.lines.append(f"auto *table_{reference.key} = call.take<{scope}{kind}>({max(1, len(rows))});")
            parameters.append(f"{kind} *{table}")
            arguments.append(f"table_{reference.key}")
            if table == "terms":
                body += self._terms(known, len(rows))
            else:
                body += array(f"{kind} all_{table}[]", rows)
                body += f"  for (int i = threadIdx.x; i < {len(rows)}; i += blockDim.x) {table}[i] = all_{table}[i];\n"
        head = f"__global__ void {name}({', '.join(parameters)})"
        self.sections.add(f"namespace {space} {{\n{head} {{\n{body}}}\n}}\n")
        self.lines.append(f"call.launch({space}::{name}, 1, {BLOCK}, 0, {', '.join(arguments)});")

    @staticmethod
    def _terms(packed: PackedWeight, count: int) -> str:
        """Statements that write the terms of ``conv_fma.cu``: of each tap, one for each channel."""
        assert not isinstance(packed.tables, HaloTables)
        geometry = packed.convolution.geometry
        channels, (_, _, depth, height, width) = geometry.in_channels // geometry.groups, geometry.input_shape
        return array("int places[][3]", packed.tables.places[:, :3]) + (
            f"  for (int i = threadIdx.x; i < {count}; i += blockDim.x) {{\n"
            f"    const int *at = places[i / {channels}], channel = i % {channels};\n"
            f"    const index_t voxel = (index_t(at[0]) * {height} + at[1]) * {width} + at[2];\n"
            f"    const index_t delta = voxel + channel * index_t({depth * height * width});\n"
            "    terms[i] = {delta, {at[0], at[1], at[2]}, channel};\n"
            "  }\n"
        )

    def _pack(self, number: int, packed: PackedWeight) -> None:
        geometry, tables = packed.convolution.geometry, packed.tables
        defines: dict[str, int | str] = {
            name: value for name, value in packed.launch.kernel.defines if name in ("STORAGE", "COMPUTE", "USE_TF32")
        }
        defines |= {"GROUPS": geometry.groups, "IN": geometry.in_channels // geometry.groups}
        defines |= {"OUT": geometry.out_channels // geometry.groups, "VOLUME": geometry.kernel_volume}
        defines["TRANSPOSED"] = int(packed.convolution.transposed)
        if isinstance(tables, HaloTables):
            tile, indices = tables.tile, list(tables.indices)
            defines |= {"HALO": 1, "BLOCK_N": tile.block_n, "SLICES": int(tile.slices), "STEPS": len(indices)}
            defines["SLICE_CHANNELS"] = int(tile.slice_channels)
        else:
            indices = tables.places[:, 3].tolist()
            steps = max(1, len(indices))
            padded = len(tables.order) // (geometry.groups * steps * (geometry.in_channels // geometry.groups))
            defines |= {"HALO": 0, "PADDED": max(1, padded), "STEPS": steps}
        table = array("int taps[]", indices or [0])
        operations = f"__device__ __forceinline__ int tap_of(int step) {{\n{table}  return taps[step];\n}}\n"
        space = self.sections.name(Kernel.of("pack_export.cu", defines, operations), "pack")
        kind, count = C_TYPES[self.program.compute], packed.elements
        self.lines += [
            f"{kind} *packed_{number} = call.take<{kind}>({count});",
            "{",
            f"  const {space}::PackParams p = {{{field(packed.tensor)}, packed_{number}, {count}}};",
            f"  call.launch({space}::pack_export, {-(-count // BLOCK)}, {BLOCK}, 0, p);",
            "}",
        ]
